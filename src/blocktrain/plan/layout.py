"""One way to run a training step: what is trained, in which precision, how many rows at a time, on how many cards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from blocktrain.chain.partition_config import Pieces
from blocktrain.errors import ConfigError, nearest
from blocktrain.plan.shapes import cut_into, cut_up_to
from blocktrain.plan.spec import ModelSpec

TrainingMethod = Literal["bcd", "full", "offload"]
TRAINING_METHODS: tuple[TrainingMethod, ...] = ("bcd", "full", "offload")
Checkpointing = Literal["none", "layers"]
CacheTier = Literal["off", "device", "host", "disk"]
WeightPlace = Literal["device", "host"]
MomentPlace = Literal["drop", "host"]
MomentFormat = Literal["fp32", "8bit"]
Role = Literal["absent", "frozen", "active"]
# Bytes of both of AdamW's moments, per active scalar; see optim/adamw8bit.py.
MOMENT_BYTES: dict[MomentFormat, float] = {"fp32": 8.0, "8bit": 2 * (1 + 4 / 256)}


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """The presets of `optim/precision.py` in numbers: bytes per scalar of each tensor, and what a preset gives up.

    weight: of an active parameter; also the bytes of the compute dtype.
    frozen: of a frozen matrix, which may be quantized (`optim/quantize_weights.py`).
    master: of an active parameter's fp32 master.
    gradient, accumulated: of the gradient of one micro-batch, and of a sum over several.
    low_bits: of every parameter, in host memory: what a bf16 weight leaves out of its fp32 master.
    dequantize: memory traffic of computing one weight from its quantized form, in plain PyTorch.
    loss: 0: nothing is given up; 1: frozen weights are rounded; 2: updates below the resolution of bf16 are lost, too.
    """

    name: str
    weight: int
    frozen: float
    master: int
    gradient: int
    accumulated: int
    low_bits: int
    dequantize: float = 0.0
    loss: int = 0

    @property
    def quantized(self) -> bool:
        """Whether frozen matrices are stored in another format than they are computed with."""
        return self.frozen != self.weight


_FP32 = PrecisionSpec(name="fp32", weight=4, frozen=4, master=0, gradient=4, accumulated=4, low_bits=0)
_EXACT = PrecisionSpec(name="bf16-exact", weight=2, frozen=2, master=4, gradient=2, accumulated=4, low_bits=2)
_SPECS = (
    _FP32,
    _EXACT,
    replace(_EXACT, name="int8", frozen=1 + 2 / 128, dequantize=7.0, loss=1),
    replace(_EXACT, name="nf4", frozen=0.5 + 2 / 64, dequantize=22.5, loss=1),
    replace(_EXACT, name="bf16", low_bits=0, loss=2),
)
PRECISION_SPECS: dict[str, PrecisionSpec] = {spec.name: spec for spec in _SPECS}


def find_precision(name: str) -> PrecisionSpec:
    """The precision called `name`; raises `ConfigError` with the nearest name."""
    if name not in PRECISION_SPECS:
        raise ConfigError(f"precision '{name}' is unknown; {nearest(name, PRECISION_SPECS)}")
    return PRECISION_SPECS[name]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A candidate. It runs on data x pipeline cards; `shards` of the data-parallel ranks share each tensor (FSDP2).

    In a pipeline each stage holds contiguous layers, and a block is the union of one piece of each stage (the paper's
    Figure 2), so that every card always has something to train.

    method: training in blocks ("bcd"), in full, or in full with the optimizer on the host ("offload").
    pieces: what a number of blocks is made of, as in `[blocks]`.
    largest: blocks are cut by their size instead of their number, if need be inside layers (`chain/segment.py`);
        `blocks` is then how many that makes.
    frozen, state, moments, loss_chunk: as in `[memory]` and `[optimizer]`.
    micro_rows: sequences that one data-parallel rank computes at a time.
    """

    method: TrainingMethod = "bcd"
    blocks: int = 3
    pieces: Pieces = "layers"
    largest: int | None = None
    precision: PrecisionSpec = _FP32
    moments: MomentFormat = "fp32"
    frozen: WeightPlace = "device"
    state: MomentPlace = "host"
    micro_rows: int = 1
    checkpointing: Checkpointing = "none"
    loss_chunk: int | None = None
    cache: CacheTier = "off"
    data: int = 1
    pipeline: int = 1
    shards: int = 1

    def __post_init__(self) -> None:
        if self.method != "bcd" and self.blocks != 1:
            raise ConfigError(f"method '{self.method}' trains one block, not {self.blocks}")
        if self.data % self.shards:
            raise ConfigError(f"{self.data} data-parallel ranks cannot be divided into groups of {self.shards} shards")
        for key in ("blocks", "micro_rows", "data", "pipeline", "shards"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be at least 1, not {getattr(self, key)}")
        if (self.largest is not None or self.pieces == "modules") and self.pipeline > 1:
            raise ConfigError("blocks that are cut inside layers can only be planned without a pipeline")

    @property
    def cards(self) -> int:
        """How many GPUs it runs on."""
        return self.data * self.pipeline

    @property
    def materializes(self) -> bool:
        """Whether frozen matrices are materialized each time their layer runs (`optim/weight_store.py`)."""
        return self.precision.quantized or self.frozen == "host"

    @property
    def losses(self) -> int:
        """How much exactness it gives up, to choose between layouts that cost the same."""
        rounded = self.precision.loss if self.method == "bcd" and self.blocks > 1 else 0
        return 2 * rounded + (self.state == "drop" and self.blocks > 1) + (self.moments == "8bit")

    @property
    def moment_bytes(self) -> float:
        """Bytes of both moments, per active scalar."""
        return MOMENT_BYTES[self.moments]


@dataclass(frozen=True, kw_only=True)
class Owned:
    """How many scalars a block owns in each part of the model.

    materialized: of all parameters of which it owns at least a part; these are whole during its visit.
    split: of the largest parameter of which it owns some rows only.
    largest: the most that it owns of one parameter.
    """

    embedding: int = 0
    layers: int = 0
    head: int = 0
    materialized: int = 0
    split: int = 0
    largest: int = 0

    @property
    def scalars(self) -> int:
        """All that it owns."""
        return self.embedding + self.layers + self.head


@dataclass(frozen=True, kw_only=True)
class CardView:
    """What one card sees of a visit: how many transformer layers in each part, and what its embedding and head do."""

    prefix: int
    active: int
    tail: int
    embedding: Role
    head: Role
    owned: Owned


def trains_projection(spec: ModelSpec, view: CardView) -> bool:
    """Whether the output projection has a gradient: it is in the block, or some of its rows are."""
    if spec.tied:
        return view.head != "absent" and view.embedding == "active"
    norm = 2 * spec.width
    return view.owned.head > norm


@lru_cache(maxsize=65536)
def card_view(spec: ModelSpec, blocks: int, block: int, stage: range | None = None) -> CardView:
    """What a card sees of a visit to `block`. The card holds the layers `stage` of the chain; None: all of them."""
    chain = stage if stage is not None else range(spec.layers + 2)
    cuts = cut_evenly(spec, chain, min(blocks, len(chain)))
    active = cuts[min(block, len(cuts) - 1)]
    inside = len(_inner(spec, active))
    embedding = spec.embedding_parameters if 0 in active else 0
    head = spec.head_parameters if spec.layers + 1 in active else 0
    outer = bool(embedding) or bool(head and not spec.tied)
    owned = Owned(
        embedding=embedding,
        layers=inside * spec.layer_parameters,
        head=head,
        materialized=embedding + head + inside * spec.layer_parameters,
        largest=max(spec.vocabulary * spec.width if outer else spec.width, spec.largest_of_layer if inside else 0),
    )
    return _view(spec, chain, active, owned)


def _view(spec: ModelSpec, chain: range, active: range, owned: Owned) -> CardView:
    def role(index: int) -> Role:
        return "active" if index in active else "frozen" if index in chain else "absent"

    below, above = (
        len(_inner(spec, part)) for part in (range(chain.start, active.start), range(active.stop, chain.stop))
    )
    first_stage = chain.start == 0  # on the others, gradients pass through the layers below the active ones, too
    return CardView(
        prefix=below if first_stage else 0,
        active=len(_inner(spec, active)),
        tail=above if first_stage else below + above,
        embedding=role(0),
        head=role(spec.layers + 1),
        owned=owned,
    )


def _inner(spec: ModelSpec, part: range) -> range:
    """The transformer layers in a part of the chain."""
    return range(max(part.start, 1), min(part.stop, spec.layers + 1))


@lru_cache(maxsize=256)
def _views_cut_inside(spec: ModelSpec, blocks: int, largest: int | None) -> tuple[CardView, ...]:
    """A view for each block that `largest`, or otherwise `pieces = "modules"`, makes."""
    views = []
    for cut in cut_into(spec, blocks) if largest is None else cut_up_to(spec, largest):
        sizes = {"embedding": 0, "layers": 0, "head": 0}
        mine: dict[str, int] = {}
        whole: dict[str, int] = {}
        for piece in cut:
            sizes[{0: "embedding", spec.layers + 1: "head"}.get(piece.layer, "layers")] += piece.size
            for name, parameter in piece.parameters.items():
                whole[name] = parameter.numel()
                mine[name] = mine.get(name, 0) + (piece.size if piece.rows else parameter.numel())
        owned = Owned(
            **sizes,
            materialized=sum(whole.values()),
            split=max((whole[name] for name in mine if mine[name] < whole[name]), default=0),
            largest=max(mine.values()),
        )
        views.append(_view(spec, range(spec.layers + 2), range(cut[0].layer, cut[-1].layer + 1), owned))
    return tuple(views)


@lru_cache(maxsize=4096)
def visits(
    spec: ModelSpec, blocks: int, pipeline: int, largest: int | None, pieces: Pieces = "layers"
) -> tuple[tuple[tuple[CardView, ...], int], ...]:
    """What the stages see in a visit, with the number of visits of a sweep in which they see it."""
    if largest is not None or pieces == "modules":
        counted = Counter((view,) for view in _views_cut_inside(spec, blocks, largest))
    else:
        stages = cut_evenly(spec, range(spec.layers + 2), pipeline)
        counted = Counter(tuple(card_view(spec, blocks, block, stage) for stage in stages) for block in range(blocks))
    return tuple(counted.items())


@lru_cache(maxsize=4096)
def cut_evenly(spec: ModelSpec, chain: range, parts: int) -> tuple[range, ...]:
    """`balanced` (chain/balance.py) over the parameters of a chain's consecutive layers, which have equal sizes.

    All blocks but two share the layers evenly: the first, which may hold the embedding, and the last, which may hold
    the head. So only the numbers of layers in those two are searched.
    """
    each = spec.layer_parameters
    before = spec.embedding_parameters if 0 in chain else 0
    after = spec.head_parameters if spec.layers + 1 in chain else 0
    layers = len(chain) - (0 in chain) - (spec.layers + 1 in chain)
    if parts == 1:
        return (chain,)
    fair = -(-(before + after + layers * each) // (parts * each)) + 1
    best: tuple[int, int] | None = None
    sizes: list[int] = []
    for last in range(min(layers, layers if parts == 2 else fair), -1 if after else 0, -1):
        rest = layers - last
        for first in (rest,) if parts == 2 else range(0 if before else 1, min(rest, fair) + 1):
            middle, more = divmod(rest - first, max(parts - 2, 1))
            if (parts > 2 and not middle) or (not first and not before):
                continue
            ends = (before + first * each, after + last * each)
            largest = max(*ends, (middle + bool(more)) * each if parts > 2 else 0)
            squares = ends[0] ** 2 + ends[1] ** 2
            squares += ((parts - 2 - more) * middle**2 + more * (middle + 1) ** 2) * each**2
            if best is None or (largest, squares) < best:
                best = (largest, squares)
                sizes = [first, *[middle] * (parts - 2 - more), *[middle + 1] * more, last]
    sizes[0] += 1 if before else 0
    stops = [chain.start + sum(sizes[: index + 1]) for index in range(parts - 1)]
    return tuple(range(start, stop) for start, stop in zip([chain.start, *stops], [*stops, chain.stop], strict=True))


@lru_cache(maxsize=4096)
def worst_views(
    spec: ModelSpec, blocks: int, pipeline: int, largest: int | None, pieces: Pieces = "layers"
) -> tuple[CardView, ...]:
    """The views, over all visits and stages, that can take the most memory.

    Memory grows with the number of layers above the active ones, and with the number below. So of views that differ
    in these two numbers only, the one with most above and the one with most below are enough.
    """
    groups: dict[tuple[object, ...], list[CardView]] = {}
    for stages, _ in visits(spec, blocks, pipeline, largest, pieces):
        for view in stages:
            key = (view.active, view.prefix + view.tail, view.embedding, view.head, view.owned)
            groups.setdefault(key, []).append(view)
    ends = (lambda view: view.tail), (lambda view: view.prefix)
    return tuple(dict.fromkeys(max(group, key=end) for group in groups.values() for end in ends))

"""One way to run a training step: what is active, in which precision, how much at a time, on how many cards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from blocktrain.chain.partition_config import Pieces
from blocktrain.chain.segment import Segment
from blocktrain.errors import ConfigError, nearest
from blocktrain.plan.shapes import cut_into, cut_up_to
from blocktrain.plan.spec import ModelSpec

Method = Literal["bcd", "full", "offload"]
METHODS: tuple[Method, ...] = ("bcd", "full", "offload")
Checkpointing = Literal["none", "layers"]
Tier = Literal["off", "device", "host", "disk"]
Place = Literal["device", "host"]
State = Literal["drop", "host"]
Moments = Literal["fp32", "8bit"]
Role = Literal["absent", "frozen", "active"]
MOMENT_BYTES: dict[Moments, float] = {"fp32": 8.0, "8bit": 2 * (1 + 4 / 256)}  # both of AdamW; optim/adamw8bit.py


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of a scalar, by what it is; the presets of `optim/precision.py`, in numbers."""

    name: str
    weight: int  # of an active parameter; also the compute dtype's
    frozen: float  # of a frozen matrix at rest: optim/quantize.py
    master: int  # beside the weight, of active parameters
    gradient: int  # of one micro-batch
    summed: int  # of several
    remainder: int  # of every parameter, in host memory: what the weights leave out of their masters
    unpacking: float = 0.0  # moved to compute one weight from its packed form, in plain PyTorch
    loses: int = 0  # 0: nothing; 1: frozen weights are rounded; 2: updates smaller than bf16 resolves, too

    @property
    def packed(self) -> bool:
        """Whether frozen matrices rest in another form than they are computed with."""
        return self.frozen != self.weight


FP32 = Precision(name="fp32", weight=4, frozen=4, master=0, gradient=4, summed=4, remainder=0)
BF16_EXACT = Precision(name="bf16-exact", weight=2, frozen=2, master=4, gradient=2, summed=4, remainder=2)
INT8 = replace(BF16_EXACT, name="int8", frozen=1 + 2 / 128, unpacking=7.0, loses=1)
NF4 = replace(BF16_EXACT, name="nf4", frozen=0.5 + 2 / 64, unpacking=22.5, loses=1)
BF16 = replace(BF16_EXACT, name="bf16", remainder=0, loses=2)
PRECISIONS = {precision.name: precision for precision in (FP32, BF16_EXACT, INT8, NF4, BF16)}


def find_precision(name: str) -> Precision:
    """The precision called `name`; raises `ConfigError` naming the nearest one."""
    if name not in PRECISIONS:
        raise ConfigError(f"precision '{name}' is unknown; {nearest(name, PRECISIONS)}")
    return PRECISIONS[name]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A candidate. Cards = data x pipeline; `shards` of the data-parallel ranks hold a part of each tensor (FSDP2).

    Under a pipeline each stage holds a contiguous piece of the layers, and a block is the union of one piece of each
    stage (the paper's Figure 2), so that every card always has something active.

    pieces: what a number of blocks is made of, as `[blocks]` takes it.
    largest: blocks are cut by their size instead of their number (`chain/segment.py`), smaller than a layer where that
        is asked for; `blocks` is then how many this makes.
    frozen, state, loss_chunk: as `[memory]` and `[optimizer]` of a run take them.
    """

    method: Method = "bcd"
    blocks: int = 3
    pieces: Pieces = "layers"
    largest: int | None = None
    precision: Precision = FP32
    moments: Moments = "fp32"
    frozen: Place = "device"
    state: State = "host"
    micro_rows: int = 1  # sequences at a time on one data-parallel rank
    checkpointing: Checkpointing = "none"
    loss_chunk: int | None = None
    cache: Tier = "off"
    data: int = 1
    pipeline: int = 1
    shards: int = 1

    def __post_init__(self) -> None:
        if self.method != "bcd" and self.blocks != 1:
            raise ConfigError(f"method '{self.method}' trains one block, not {self.blocks}")
        if self.data % self.shards:
            raise ConfigError(f"{self.data} data-parallel ranks cannot be cut into shards of {self.shards}")
        for key in ("blocks", "micro_rows", "data", "pipeline", "shards"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be at least 1, not {getattr(self, key)}")
        if (self.largest is not None or self.pieces == "modules") and self.pipeline > 1:
            raise ConfigError("blocks cut inside of layers are planned without a pipeline")

    @property
    def cards(self) -> int:
        """GPUs it runs on."""
        return self.data * self.pipeline

    @property
    def rests(self) -> bool:
        """Whether frozen matrices are materialized for each run of their layer (`optim/offloaded_weights.py`)."""
        return self.precision.packed or self.frozen == "host"

    @property
    def losses(self) -> int:
        """What it gives up against exact training, for a choice between layouts that cost the same."""
        rounded = self.precision.loses if self.method == "bcd" and self.blocks > 1 else 0
        return 2 * rounded + (self.state == "drop" and self.blocks > 1) + (self.moments == "8bit")

    @property
    def moment_bytes(self) -> float:
        """Of an active scalar."""
        return MOMENT_BYTES[self.moments]


@dataclass(frozen=True, kw_only=True)
class Owned:
    """Scalars that a block owns, by where, and of what they are made."""

    embedding: int = 0
    layers: int = 0
    head: int = 0
    awake: int = 0  # of all parameters that it owns something of
    cut: int = 0  # of the largest parameter of which it owns some rows only
    largest: int = 0  # that it owns of one parameter

    @property
    def scalars(self) -> int:
        """All."""
        return self.embedding + self.layers + self.head


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one card sees of a visit: its transformer layers by their part, and its embedding and head."""

    prefix: int
    active: int
    tail: int
    embedding: Role
    head: Role
    owned: Owned


def trains_projection(spec: ModelSpec, piece: Piece) -> bool:
    """Whether the output projection has a gradient: it is in the block, or some of its rows are."""
    if spec.tied:
        return piece.head != "absent" and piece.embedding == "active"
    norm = 2 * spec.width
    return piece.owned.head > norm


@lru_cache(maxsize=65536)
def piece_of(spec: ModelSpec, blocks: int, block: int, stage: range | None = None) -> Piece:
    """What a card that holds the chain's layers `stage` (None: all of them) sees of a visit to `block`."""
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
        awake=embedding + head + inside * spec.layer_parameters,
        largest=max(spec.vocabulary * spec.width if outer else spec.width, spec.largest_of_layer if inside else 0),
    )
    return _piece(spec, chain, active, owned)


def _piece(spec: ModelSpec, chain: range, active: range, owned: Owned) -> Piece:
    def role(index: int) -> Role:
        return "active" if index in active else "frozen" if index in chain else "absent"

    below, above = (
        len(_inner(spec, part)) for part in (range(chain.start, active.start), range(active.stop, chain.stop))
    )
    first_stage = chain.start == 0  # on the others, gradients pass through the layers below the active ones, too
    return Piece(
        prefix=below if first_stage else 0,
        active=len(_inner(spec, active)),
        tail=above if first_stage else below + above,
        embedding=role(0),
        head=role(spec.layers + 1),
        owned=owned,
    )


def _inner(spec: ModelSpec, part: range) -> range:
    """The transformer layers of a part of the chain."""
    return range(max(part.start, 1), min(part.stop, spec.layers + 1))


@lru_cache(maxsize=256)
def _cut_inside(spec: ModelSpec, blocks: int, largest: int | None) -> tuple[Piece, ...]:
    """Of each visit to the blocks that `largest`, or else `pieces = "modules"`, makes."""
    return tuple(
        _piece(spec, range(spec.layers + 2), range(cut[0].layer, cut[-1].layer + 1), _owned(spec, cut))
        for cut in (cut_into(spec, blocks) if largest is None else cut_up_to(spec, largest))
    )


def _owned(spec: ModelSpec, cut: Sequence[Segment]) -> Owned:
    places = {0: "embedding", spec.layers + 1: "head"}
    sizes = {"embedding": 0, "layers": 0, "head": 0}
    of_parameter: dict[str, int] = {}
    whole: dict[str, int] = {}
    for piece in cut:
        sizes[places.get(piece.layer, "layers")] += piece.size
        for name, parameter in piece.parameters.items():
            whole[name] = parameter.numel()
            of_parameter[name] = of_parameter.get(name, 0) + (piece.size if piece.rows else parameter.numel())
    return Owned(
        **sizes,
        awake=sum(whole.values()),
        cut=max((whole[name] for name, mine in of_parameter.items() if mine < whole[name]), default=0),
        largest=max(of_parameter.values()),
    )


@lru_cache(maxsize=4096)
def visits(
    spec: ModelSpec, blocks: int, pipeline: int, largest: int | None, pieces: Pieces = "layers"
) -> tuple[tuple[tuple[Piece, ...], int], ...]:
    """What the stages see in a visit, and in how many visits of a sweep they see it."""
    if largest is not None or pieces == "modules":
        counted = Counter((piece,) for piece in _cut_inside(spec, blocks, largest))
    else:
        stages = cut_evenly(spec, range(spec.layers + 2), pipeline)
        counted = Counter(tuple(piece_of(spec, blocks, block, stage) for stage in stages) for block in range(blocks))
    return tuple(counted.items())


@lru_cache(maxsize=4096)
def cut_evenly(spec: ModelSpec, chain: range, parts: int) -> tuple[range, ...]:
    """`balanced` (chain/balance.py) over the parameters of consecutive layers of a chain, for layers that are alike.

    All blocks but the first, which may hold the embedding, and the last, which may hold the head, share the rest
    evenly; so only how many layers those two take is searched.
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
def worst_pieces(
    spec: ModelSpec, blocks: int, pipeline: int, largest: int | None, pieces: Pieces = "layers"
) -> tuple[Piece, ...]:
    """What a card may see, over all visits and stages. Of those that differ in the layers around the active ones alone
    those with most above and with most below are enough: memory grows with either."""
    alike: dict[tuple[object, ...], list[Piece]] = {}
    for stages, _ in visits(spec, blocks, pipeline, largest, pieces):
        for piece in stages:
            kind = (piece.active, piece.prefix + piece.tail, piece.embedding, piece.head, piece.owned)
            alike.setdefault(kind, []).append(piece)
    ends = (lambda piece: piece.tail), (lambda piece: piece.prefix)
    return tuple(dict.fromkeys(max(group, key=end) for group in alike.values() for end in ends))

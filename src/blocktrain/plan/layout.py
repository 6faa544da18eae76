"""One way to run a training step: what is active, in which precision, how much at a time, on how many cards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from blocktrain.errors import ConfigError, nearest
from blocktrain.plan.spec import ModelSpec

Method = Literal["bcd", "full", "offload"]
METHODS: tuple[Method, ...] = ("bcd", "full", "offload")
Checkpointing = Literal["none", "layers"]
Tier = Literal["off", "device", "host", "disk"]
Role = Literal["absent", "frozen", "active"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of a scalar, by what it is. `docs/decisions/0004-fp32-and-bf16-exact.md` says what the second is."""

    name: str
    weight: int  # also the compute dtype's
    master: int  # beside the weight, of active parameters
    gradient: int
    moments: int  # both of AdamW
    host: int  # of every parameter, in host memory: what the weights leave out of their masters
    updating: int  # while one parameter is written back after its step


FP32 = Precision(name="fp32", weight=4, master=0, gradient=4, moments=8, host=0, updating=0)
# Writing back: the master's bits (int32), the half (int16), a mask (bool): see optim/precision.py, `half`.
BF16_EXACT = Precision(name="bf16-exact", weight=2, master=4, gradient=4, moments=8, host=2, updating=7)
PRECISIONS = {precision.name: precision for precision in (FP32, BF16_EXACT)}


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
    """

    method: Method = "bcd"
    blocks: int = 3
    precision: Precision = FP32
    micro_rows: int = 1  # sequences at a time on one data-parallel rank
    checkpointing: Checkpointing = "none"
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

    @property
    def cards(self) -> int:
        """GPUs it runs on."""
        return self.data * self.pipeline


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one card sees of a visit: its transformer layers by their part, and its embedding and head."""

    prefix: int
    active: int
    tail: int
    embedding: Role
    head: Role


@lru_cache(maxsize=65536)
def piece_of(spec: ModelSpec, blocks: int, block: int, stage: range | None = None) -> Piece:
    """What a card that holds the chain's layers `stage` (None: all of them) sees of a visit to `block`."""
    chain = stage if stage is not None else range(spec.layers + 2)
    cuts = cut_evenly(spec, chain, min(blocks, len(chain)))
    active = cuts[min(block, len(cuts) - 1)]

    def role(index: int) -> Role:
        return "active" if index in active else "frozen" if index in chain else "absent"

    def inner(part: range) -> int:
        return len(range(max(part.start, 1), min(part.stop, spec.layers + 1)))

    below, above = inner(range(chain.start, active.start)), inner(range(active.stop, chain.stop))
    first_stage = chain.start == 0  # on the others, gradients pass through the layers below the active ones, too
    return Piece(
        prefix=below if first_stage else 0,
        active=inner(active),
        tail=above if first_stage else below + above,
        embedding=role(0),
        head=role(spec.layers + 1),
    )


@lru_cache(maxsize=4096)
def cut_evenly(spec: ModelSpec, chain: range, parts: int) -> tuple[range, ...]:
    """`balanced` (blocks/balance.py) over the parameters of consecutive layers of a chain, for layers that are alike.

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


def pieces(spec: ModelSpec, blocks: int, pipeline: int = 1) -> tuple[Piece, ...]:
    """What a card may see, over all visits and stages; pieces that are alike are listed once."""
    stages = cut_evenly(spec, range(spec.layers + 2), pipeline)
    return _pieces(spec, blocks, stages)


@lru_cache(maxsize=4096)
def _pieces(spec: ModelSpec, blocks: int, stages: tuple[range, ...]) -> tuple[Piece, ...]:
    return tuple(dict.fromkeys(piece_of(spec, blocks, block, stage) for stage in stages for block in range(blocks)))

"""One way to run a training step: what is active, in which precision, how much at a time, on how many cards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from blocktrain.blocks.balance import balanced
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
# Writing back: the master's bits and their sum (int32), the half (int16), a mask (bool): see optim/precision.py, `half`.
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
    cuts = _cut(tuple(spec.chain_parameters[index] for index in chain), min(blocks, len(chain)))
    mine = cuts[min(block, len(cuts) - 1)]
    active = range(chain.start + mine.start, chain.start + mine.stop)

    def role(index: int) -> Role:
        return "active" if index in active else "frozen" if index in chain else "absent"

    inner = [index for index in chain if 1 <= index <= spec.layers]
    return Piece(
        prefix=sum(index < active.start for index in inner),
        active=sum(index in active for index in inner),
        tail=sum(index >= active.stop for index in inner),
        embedding=role(0),
        head=role(spec.layers + 1),
    )


@lru_cache(maxsize=4096)
def _cut(costs: tuple[int, ...], parts: int) -> list[range]:
    return balanced(costs, parts)


def pieces(spec: ModelSpec, blocks: int, pipeline: int = 1) -> tuple[Piece, ...]:
    """What a card may see, over all visits and stages; pieces that are alike are listed once."""
    stages = _cut(spec.chain_parameters, pipeline)
    return tuple(dict.fromkeys(piece_of(spec, blocks, block, stage) for stage in stages for block in range(blocks)))

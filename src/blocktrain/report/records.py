"""The records of a run's log, typed. Fields and records this version does not know are left out when a log is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Bytes = Mapping[str, int]  # part of memory ("weights", "master", "gradients", ...) -> bytes


@dataclass(frozen=True, kw_only=True)
class BlockInfo:
    """One block of the partition, by the names of its first and last layer."""

    index: int
    first: str
    last: str
    layers: int
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """The `run` record: what is trained and how. For images a token is one image."""

    method: str
    name: str
    model: str
    parameters: int
    unit: str = "tokens"
    tokens_per_step: int
    rows_per_step: int
    steps_planned: int | None = None
    optimizer: str = ""
    precision: str = ""
    state: str = ""
    span: str = "block"
    tail: str = "none"
    layout: str = "data"
    device: str = ""
    blocks: tuple[BlockInfo, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The `cost` record: FLOPs of one optimizer step and bytes held during it, full training and each block."""

    flops_full: int
    flops_blocks: tuple[int, ...]
    theory_full: int
    theory_blocks: tuple[int, ...]
    memory_full: Bytes
    memory_blocks: tuple[Bytes, ...]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes by part at the worst moment of a step, those on the host beside them, and the operation that made it so."""

    parts: Bytes
    host_bytes: int = 0
    operation: str = ""


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """The `memory` record: the tracked peak of full training and of each block."""

    full: Peak
    blocks: tuple[Peak, ...]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The `micro_batch` record: how many rows at a time `batch.micro_rows = "auto"` came to, and why."""

    micro_rows: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A block became active. `tokens` and `seconds` count from the start of the run, here and below; `left_out` layers
    are not run, being the identity still, which makes `step_flops` of a step; None where it has the block's cost."""

    visit: int
    sweep: int
    block: int
    step: int
    tokens: int
    seconds: float
    left_out: int = 0
    step_flops: int | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step; `loss` is in nats per token and may be nan."""

    step: int
    tokens: int
    seconds: float
    visit: int
    block: int
    loss: float
    lr: float = float("nan")
    grad_norm: float = float("nan")
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One pass over the validation data; `loss` in nats per token, `loss_per_byte` in nats per byte of text."""

    step: int
    tokens: int
    seconds: float
    visit: int
    block: int | None  # None between visits
    loss: float
    loss_per_byte: float | None = None
    accuracy: float | None = None
    exact_match: float | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The model's answer to a validation prompt, at an evaluation."""

    step: int
    prompt: str
    text: str
    expected: str
    correct: bool


@dataclass(frozen=True, kw_only=True)
class Retirement:
    """The active block's visit ended, and why."""

    visit: int
    block: int
    step: int
    tokens: int
    seconds: float
    reason: str
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class CacheChoice:
    """The `cache` record: where a visit stores its prefix (None: nowhere), and why."""

    visit: int
    block: int
    step: int
    tokens: int
    seconds: float
    place: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """The `cached` record: what the prefix cache did in a visit, whose end it marks.

    `rows` were asked for by steps, and `hits` of them found stored; `flops_saved` is net of filling and can be
    negative, `seconds_saved` is estimated from it.
    """

    visit: int
    block: int
    step: int
    tokens: int
    seconds: float
    place: str
    dtype: str
    bytes: int
    rows: int
    hits: int
    computed: int
    stale: int = 0
    damaged: int = 0
    fill_seconds: float
    wait_seconds: float
    encoding_error: float = 0.0
    flops_saved: int
    seconds_saved: float


@dataclass(frozen=True, kw_only=True)
class End:
    """The run ended by itself; losses are those of the last evaluation, `flops` those of the whole run."""

    reason: str
    steps: int
    tokens: int
    sweeps: int
    seconds: float
    loss: float | None = None
    loss_per_byte: float | None = None
    accuracy: float | None = None
    exact_match: float | None = None
    optimizer_bytes: int | None = None
    flops: int | None = None
    peak_memory_bytes: int | None = None

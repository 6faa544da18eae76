"""The records of a run, typed. The trainer writes them; the live line, trackers, reports and comparisons read them.

    run, cost, memory, micro_batch       the opening: what is trained, and what a step of it costs
    visit                                a block becomes active
      cache                              where the visit stores its prefix, and why
      step, evaluation, sample           what training shows
      cached                             what the prefix cache did in the visit
    retire                               the visit is over, and why
    end                                  the run is over

Positions count from the start of the run, over all of its sessions: `step` in optimizer steps, `tokens` in training
tokens (images, for an image model), `seconds` in wall-clock time. Losses are in nats per token, image or text.
Nothing trains from these records: a run resumes from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from blocktrain.records.codec import Event, decode, encode

Bytes = Mapping[str, int]  # part of memory ("frozen", "moments", ...) -> bytes


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of `events.jsonl`. A field marked `optional` is left out of the line while it has its default."""

    kind: ClassVar[str]

    def to_event(self) -> Event:
        """The line as a dictionary of plain values."""
        return {"kind": self.kind, **encode(self)}


def optional(default: Any) -> Any:
    """A field that is written only where it differs from `default`."""
    return field(default=default, metadata={"optional": True})


# -- the opening ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BlockSummary:
    """One block of the partition, by the names of its first and its last piece."""

    index: int
    first: str
    last: str
    layers: int
    parameters: int


@dataclass(frozen=True, kw_only=True)
class RunHeader(Record):
    """What is trained, and how."""

    kind: ClassVar[str] = "run"
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
    micro_rows: int | str | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)  # the table [memory]
    layout: str = "data"
    device: str = ""
    processes: int = 1
    span: str = "block"
    tail: str = "none"
    blocks: tuple[BlockSummary, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """FLOPs of one optimizer step over all of its rows: counted, and by the closed form of `chain/cost.py`."""

    full: int  # every block active
    blocks: tuple[int, ...]  # in a visit to each block
    theory_full: int
    theory_blocks: tuple[int, ...]
    forward_layers: tuple[int, ...] = ()  # of each layer's forward pass


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes that one process holds in a step, by arithmetic: weights, master, gradients, moments and activations."""

    full: Bytes
    blocks: tuple[Bytes, ...]


@dataclass(frozen=True, kw_only=True)
class GrowingStep:
    """FLOPs of a step in the visits to `block` that leave the `left_out` highest layers out."""

    block: int
    left_out: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class StepCosts(Record):
    """What one optimizer step costs with every block active, and in a visit to each block."""

    kind: ClassVar[str] = "cost"
    flops: StepFlops
    memory: StepMemory
    growing: tuple[GrowingStep, ...] = optional(())

    def step_flops(self, block: int, left_out: int = 0) -> int:
        """FLOPs of a step in a visit to `block` that leaves `left_out` layers out."""
        if not left_out:
            return self.flops.blocks[block]
        return {(step.block, step.left_out): step.flops for step in self.growing}[block, left_out]


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The worst moment of a step: bytes by part, what lay on the host at the time, and the operation that made it."""

    parts: Bytes
    host_bytes: int = 0
    operation: str = ""


@dataclass(frozen=True, kw_only=True)
class MemoryPeaks(Record):
    """The tracked peak of a step with every block active, and in a visit to each block."""

    kind: ClassVar[str] = "memory"
    blocks: tuple[PeakMemory, ...]
    full: PeakMemory


@dataclass(frozen=True, kw_only=True)
class MicroBatch(Record):
    """What `batch.micro_rows = "auto"` came to, and why. failed: sizes that ran out of memory when they were tried."""

    kind: ClassVar[str] = "micro_batch"
    micro_rows: int
    reason: str
    failed: tuple[int, ...] = ()


# -- a visit --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VisitStart(Record):
    """A block became active. `left_out` layers are not run because they are still the identity; `step_flops` is then
    what a step costs without them."""

    kind: ClassVar[str] = "visit"
    visit: int
    sweep: int
    block: int
    step: int
    tokens: int
    seconds: float
    left_out: int = optional(0)
    step_flops: int | None = optional(None)


@dataclass(frozen=True, kw_only=True)
class CacheDecision(Record):
    """Where a visit stores its prefix (`place`; None: nowhere), and why. `level` is the boundary that is stored."""

    kind: ClassVar[str] = "cache"
    place: str | None
    reason: str
    level: int
    visit: int
    sweep: int = 0
    block: int
    step: int
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Step(Record):
    """One optimizer step; `loss` and `grad_norm` may be nan."""

    kind: ClassVar[str] = "step"
    step: int
    tokens: int
    seconds: float
    visit: int
    sweep: int = 0
    block: int
    loss: float
    lr: float = float("nan")
    grad_norm: float = float("nan")
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """One pass over the validation rows; `loss_per_byte` in nats per byte of text. `block` is None between visits."""

    kind: ClassVar[str] = "evaluation"
    step: int
    tokens: int
    seconds: float
    visit: int
    block: int | None
    loss: float
    loss_per_byte: float | None = None
    accuracy: float | None = None
    exact_match: float | None = optional(None)


@dataclass(frozen=True, kw_only=True)
class Sample(Record):
    """The model's answer to a validation prompt, at an evaluation."""

    kind: ClassVar[str] = "sample"
    step: int
    prompt: str
    text: str
    expected: str
    correct: bool


@dataclass(frozen=True, kw_only=True)
class CacheUse(Record):
    """What the prefix cache did in a visit, summed over all ranks and sessions.

    Steps requested `rows` rows, and `hits` of them were stored. `flops_saved` is net of filling and can be negative;
    `seconds_saved` is estimated from it. Seconds are means over the ranks.
    """

    kind: ClassVar[str] = "cached"
    place: str
    dtype: str
    bytes: int
    rows: int
    hits: int
    computed: int
    stale: int = 0
    damaged: int = 0
    flops_saved: int
    fill_seconds: float
    wait_seconds: float
    encoding_error: float = 0.0
    seconds_saved: float
    visit: int
    sweep: int = 0
    block: int
    step: int
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class VisitEnd(Record):
    """The active block retired, and why. peak_reserved_bytes: what the allocator had taken from a GPU at most; the
    difference to peak_memory_bytes is what it could not use."""

    kind: ClassVar[str] = "retire"
    visit: int
    sweep: int = 0
    block: int
    step: int
    tokens: int
    seconds: float
    reason: str
    peak_memory_bytes: int | None = None
    peak_reserved_bytes: int | None = optional(None)


@dataclass(frozen=True, kw_only=True)
class RunEnd(Record):
    """The run ended by itself; losses are those of the last evaluation, `flops` those of the whole run."""

    kind: ClassVar[str] = "end"
    reason: str
    steps: int
    tokens: int
    sweeps: int
    seconds: float
    loss: float | None = None
    loss_per_byte: float | None = None
    accuracy: float | None = None
    exact_match: float | None = optional(None)
    optimizer_bytes: int | None = None
    flops: int | None = None
    peak_memory_bytes: int | None = None


RECORDS: dict[str, type[Record]] = {
    cls.kind: cls
    for cls in (
        RunHeader,
        StepCosts,
        MemoryPeaks,
        MicroBatch,
        VisitStart,
        CacheDecision,
        Step,
        Evaluation,
        Sample,
        CacheUse,
        VisitEnd,
        RunEnd,
    )
}


def from_event(event: Event) -> Record | None:
    """The record of a line that was read back; None for a kind that this version does not know.

    Unknown fields are ignored, and names that older logs use are translated. Raises `KeyError`, `TypeError` or
    `ValueError` where a field without a default is missing or has another type.
    """
    cls = RECORDS.get(str(event.get("kind")))
    return None if cls is None else decode(cls, _in_todays_words(event))


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The first records of a run: `run`, `cost`, `memory` and, where it was decided at the start, `micro_batch`."""

    header: RunHeader
    costs: StepCosts
    memory: MemoryPeaks
    micro_batch: MicroBatch | None = None

    @property
    def records(self) -> list[Record]:
        """Those that there are, in the order of the log."""
        return [self.header, self.costs, self.memory, *([] if self.micro_batch is None else [self.micro_batch])]

    def to_events(self) -> list[Event]:
        """As plain values, which rank 0 broadcasts."""
        return [record.to_event() for record in self.records]

    @classmethod
    def from_events(cls, events: list[Event]) -> Opening:
        """What `to_events` gave."""
        found = {type(record): record for record in map(from_event, events)}
        return cls(
            header=found[RunHeader],  # pyright: ignore[reportArgumentType]
            costs=found[StepCosts],  # pyright: ignore[reportArgumentType]
            memory=found[MemoryPeaks],  # pyright: ignore[reportArgumentType]
            micro_batch=found.get(MicroBatch),  # pyright: ignore[reportArgumentType]
        )


# Names that older logs use, translated into those of today, so that their runs can still be reported and compared.
OLD_LAYOUTS = {"rows": "data", "layers": "pipeline", "shards": "fsdp"}  # of a run over several processes
OLD_MEMORY_PARTS = {"optimizer": "moments"}  # of a step, in the record `cost`


def _in_todays_words(event: Event) -> Event:
    """The line `event` as this version would write it; `event` itself is left as it is."""
    match event["kind"]:
        case "run" if "layout" in event:
            return {**event, "layout": OLD_LAYOUTS.get(event["layout"], event["layout"])}
        case "cost":
            memory = event["memory"]
            full, *blocks = (
                {OLD_MEMORY_PARTS.get(part, part): size for part, size in parts.items()}
                for parts in (memory["full"], *memory["blocks"])
            )
            return {**event, "memory": {**memory, "full": full, "blocks": blocks}}
        case _:
            return event

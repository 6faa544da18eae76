"""Where a run stands: plain numbers, all that a checkpoint needs beside tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from blocktrain.errors import CheckpointError
from blocktrain.stopping import RuleState


@dataclass(kw_only=True)
class TrainerState:
    """Position in the schedule and sums so far. Data order and randomness follow from `step` and the seed."""

    step: int = 0  # optimizer steps done
    visit: int = 0  # index of the current visit
    visit_step: int = 0  # steps of it done
    sweep: int = 0
    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0  # wall-clock of all sessions
    optimizer_bytes: int = 0  # the most held so far by the active block's optimizer
    rule: RuleState = field(default_factory=dict)
    visit_over: str | None = None  # why the current visit has ended, once it has
    run_over: str | None = None
    evaluated: int | None = None  # step of the last evaluation
    score: dict[str, Any] = field(default_factory=dict)  # its figures
    techniques: dict[str, Any] = field(default_factory=dict)  # the state of each that has one, by name
    micro_rows: int | None = None  # what `batch.micro_rows = "auto"` came to
    header: dict[str, Any] = field(default_factory=dict)  # the run's header record: how it is trained at present

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainerState:
        """What `to_json` gave; raises `CheckpointError` for anything else."""
        if set(values) != {item.name for item in fields(cls)}:
            raise CheckpointError(f"the checkpoint's progress has fields {sorted(values)}; it is of another version")
        return cls(**values)

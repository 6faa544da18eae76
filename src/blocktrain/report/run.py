"""A run as its folder tells it: the typed records of its log, and the sums that every report needs of them.

Records and fields that this version does not know are ignored, so an older report can read a newer log. A run without
an `end` record (still training, killed or interrupted) can be reported like any other: only `RunRecord.end` is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from blocktrain.errors import DataError
from blocktrain.parse import parse_json
from blocktrain.records.log import read_events
from blocktrain.records.run_records import (
    CacheDecision,
    CacheUse,
    Evaluation,
    MemoryPeaks,
    MicroBatch,
    Record,
    RunEnd,
    RunHeader,
    Sample,
    Step,
    StepCosts,
    VisitEnd,
    VisitStart,
    from_event,
)

R = TypeVar("R", bound=Record)
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything a run folder tells, in the order it happened; `details` is its `run.json`."""

    folder: Path
    header: RunHeader
    cost: StepCosts | None
    visits: Sequence[VisitStart]
    steps: Sequence[Step]
    evaluations: Sequence[Evaluation]
    visit_ends: Sequence[VisitEnd]
    end: RunEnd | None
    cache_decisions: Sequence[CacheDecision] = ()
    cache_uses: Sequence[CacheUse] = ()
    samples: Sequence[Sample] = ()
    memory_peaks: MemoryPeaks | None = None
    micro_batch: MicroBatch | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> RunRecord:
        """Read `events.jsonl` and `run.json`.

        Raises `DataError` where there is no log, or one that is not a run's.
        """
        path = folder / "events.jsonl"
        records = [_record(event, f"'{path}' line {line}") for line, event in enumerate(read_events(path), start=1)]

        def every(kind: type[R]) -> list[R]:
            return [record for record in records if isinstance(record, kind)]

        def last(kind: type[R]) -> R | None:
            return next((record for record in reversed(records) if isinstance(record, kind)), None)

        header = last(RunHeader)
        if header is None:
            raise DataError(f"'{path}' has no 'run' record; is '{folder}' the folder of a run that has started?")
        try:
            details = parse_json((folder / "run.json").read_bytes(), "run.json")
        except (OSError, DataError):
            details = {}  # a report is about the log and does without a description that is lost
        # A run that was resumed after its end has taken further steps since: it has not ended yet.
        ended = next((record for record in reversed(records) if isinstance(record, RunEnd | Step)), None)
        return cls(
            folder=folder,
            header=header,
            cost=last(StepCosts),
            visits=every(VisitStart),
            steps=every(Step),
            evaluations=every(Evaluation),
            visit_ends=every(VisitEnd),
            end=ended if isinstance(ended, RunEnd) else None,
            cache_decisions=every(CacheDecision),
            cache_uses=every(CacheUse),
            samples=every(Sample),
            memory_peaks=last(MemoryPeaks),
            micro_batch=last(MicroBatch),
            details=details if isinstance(details, dict) else {},
        )

    @property
    def is_full(self) -> bool:
        """Whether every parameter is trained at once."""
        return self.header.method == "full"

    @property
    def tokens(self) -> int:
        """Training tokens seen so far."""
        return max((row.tokens for row in self._last), default=0)

    @property
    def seconds(self) -> float:
        """Wall time so far."""
        return max((row.seconds for row in self._last), default=0.0)

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far, as far as the log tells: it may omit steps."""
        return max((row.steps if isinstance(row, RunEnd) else row.step for row in self._last), default=0)

    @property
    def _last(self) -> tuple[VisitStart | Step | Evaluation | VisitEnd | RunEnd, ...]:
        ends = (self.end,) if self.end else ()
        return (*self.visits[-1:], *self.steps[-1:], *self.evaluations[-1:], *self.visit_ends[-1:], *ends)

    def step_flops(self, block: int) -> int:
        """Counted FLOPs of a step that runs the whole model while `block` is active and nothing is cached.

        0 where the log has no costs.
        """
        if self.cost is None:
            return 0
        flops = self.cost.flops
        return flops.blocks[block] if not self.is_full and block < len(flops.blocks) else flops.full

    def visit_flops(self, visit: VisitStart) -> int:
        """Counted FLOPs of a step in `visit`, which may leave layers out; nothing is cached."""
        return self.step_flops(visit.block) if visit.step_flops is None else visit.step_flops

    def mean_step_flops(self, block: int) -> float:
        """Mean FLOPs of a step in the visits to `block` so far, less what the prefix cache saved."""
        visits = {visit.visit: visit for visit in self.visits if visit.block == block}
        taken = [(visits[row.visit], row.step) for row in self.visit_ends if row.visit in visits]
        steps = sum(stop - visit.step for visit, stop in taken)
        if not steps or self.cost is None:
            return self.step_flops(block)
        spent = sum((stop - visit.step) * self.visit_flops(visit) for visit, stop in taken)
        return (spent - sum(use.flops_saved for use in self.cache_uses if use.block == block)) / steps

    def flops_until(self, step: int) -> int:
        """FLOPs of the first `step` steps: `uncached_flops_until`, less what the prefix cache saved.

        The log has only the sum of a visit's savings, at the visit's end. They are spread evenly over the visit's
        steps, so that the count never falls.
        """
        if self.cost is None:
            return 0
        spent = self.uncached_flops_until(step)
        begun = {visit.visit: visit.step for visit in self.visits}
        for use in self.cache_uses:
            start = begun.get(use.visit, use.step)
            if step >= use.step:
                spent -= use.flops_saved
            elif step > start:
                spent -= use.flops_saved * (step - start) // (use.step - start)
        total = None if self.end is None else self.end.flops
        if self.end is None or total is None:
            return spent
        # The end record is right even where a visit was interrupted, whose own record has only what came afterwards.
        return total if step >= self.end.steps else min(spent, total)

    def uncached_flops_until(self, step: int) -> int:
        """Counted FLOPs that the first `step` steps would have cost without a cache."""
        return self.spent_until(step, self.visit_flops) if self.visits else step * self.step_flops(0)

    def spent_until(self, step: Number, cost_of: Callable[[VisitStart], Number]) -> Number:
        """The cost of the first `step` steps, where each step of a visit costs `cost_of(visit)`."""
        stops = [*(visit.step for visit in self.visits[1:]), step]
        return sum(
            max(min(step, stop) - visit.step, 0) * cost_of(visit)
            for visit, stop in zip(self.visits, stops, strict=True)
        )


def _record(event: object, place: str) -> Record | None:
    """The record of a line of a log; raises `DataError`, whose message begins with `place`, where it has odd values."""
    if not isinstance(event, dict):
        return None
    try:
        return from_event(event)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        words = (
            str(error) if isinstance(error, ValueError) else f"the values of '{event.get('kind')}' are of other kinds"
        )
        raise DataError(
            f"{place} holds a record that cannot be read: {words}; restore the file from a copy, or remove that line"
        ) from error

"""A run read back from its folder: every record typed, so that the rest of the report never touches raw JSON.

Records and fields this version does not know are left out, so older reports read newer logs. A run without an
`end` record (still going, killed, interrupted) is as good as any other; only `RunRecord.end` is None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from blocktrain.errors import DataError
from blocktrain.records.log import Event, read_events
from blocktrain.report.records import (
    BlockInfo,
    Bytes,
    CacheChoice,
    CacheUse,
    Cost,
    End,
    Evaluation,
    Header,
    MicroBatch,
    Peak,
    Retirement,
    Sample,
    Step,
    Tracked,
    Visit,
)

T = TypeVar("T")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything a run folder tells, in the order it happened; `details` is its `run.json`."""

    folder: Path
    header: Header
    cost: Cost | None
    visits: Sequence[Visit]
    steps: Sequence[Step]
    evaluations: Sequence[Evaluation]
    retirements: Sequence[Retirement]
    end: End | None
    cache_choices: Sequence[CacheChoice] = ()
    cache_uses: Sequence[CacheUse] = ()
    samples: Sequence[Sample] = ()
    tracked: Tracked | None = None
    micro_batch: MicroBatch | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> RunRecord:
        """Read `events.jsonl` and `run.json`; raises `DataError` where there is no log or it is not one of ours."""
        path = folder / "events.jsonl"
        kinds: dict[str, list[Event]] = {}
        for event in read_events(path):
            kind = event.get("kind", "") if isinstance(event, dict) else ""
            if kind == "step":  # a resumed run goes on behind its old end
                kinds.pop("end", None)
            kinds.setdefault(kind, []).append(event)
        if "run" not in kinds:
            raise DataError(f"'{path}' has no 'run' record; is '{folder}' the folder of a run that has started?")
        try:
            return cls(
                folder=folder,
                header=_header(kinds["run"][-1]),
                cost=_cost(kinds["cost"][-1]) if "cost" in kinds else None,
                visits=_all(Visit, kinds.get("visit")),
                steps=_all(Step, kinds.get("step")),
                evaluations=_all(Evaluation, kinds.get("evaluation")),
                retirements=_all(Retirement, kinds.get("retire")),
                end=_typed(End, kinds["end"][-1]) if "end" in kinds else None,
                cache_choices=_all(CacheChoice, kinds.get("cache")),
                cache_uses=_all(CacheUse, kinds.get("cached")),
                samples=_all(Sample, kinds.get("sample")),
                tracked=_tracked(kinds["memory"][-1]) if "memory" in kinds else None,
                micro_batch=_typed(MicroBatch, kinds["micro_batch"][-1]) if "micro_batch" in kinds else None,
                details=_details(folder / "run.json"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"'{path}' holds a record this version cannot read: {error}") from error

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
        """Optimizer steps so far, as far as the log tells: it may leave steps out."""
        return max((row.steps if isinstance(row, End) else row.step for row in self._last), default=0)

    @property
    def _last(self) -> tuple[Visit | Step | Evaluation | Retirement | End, ...]:
        ends = (self.end,) if self.end else ()
        return (*self.visits[-1:], *self.steps[-1:], *self.evaluations[-1:], *self.retirements[-1:], *ends)

    def step_flops(self, block: int) -> int:
        """Counted FLOPs of one step of the whole model while `block` is active and nothing is cached; 0 where the log
        has no costs."""
        if self.cost is None:
            return 0
        known = not self.is_full and block < len(self.cost.flops_blocks)
        return self.cost.flops_blocks[block] if known else self.cost.flops_full

    def visit_flops(self, visit: Visit) -> int:
        """The same of the layers that a step of `visit` runs."""
        return self.step_flops(visit.block) if visit.step_flops is None else visit.step_flops

    def mean_step_flops(self, block: int) -> float:
        """The same less what the prefix cache saved in a step of `block`, averaged over its visits so far."""
        visits = {visit.visit: visit for visit in self.visits if visit.block == block}
        taken = [(visits[row.visit], row.step) for row in self.retirements if row.visit in visits]
        steps = sum(stop - visit.step for visit, stop in taken)
        if not steps or self.cost is None:
            return self.step_flops(block)
        spent = sum((stop - visit.step) * self.visit_flops(visit) for visit, stop in taken)
        return (spent - sum(use.flops_saved for use in self.cache_uses if use.block == block)) / steps

    def flops_until(self, step: int) -> int:
        """FLOPs of the first `step` steps: those of `uncached_flops_until`, less what the prefix cache saved.

        A visit's savings are spread evenly over its steps, so that the count never falls: the log tells only their
        sum, at the visit's end.
        """
        if self.cost is None:
            return 0
        spent = self.uncached_flops_until(step) - self._flops_saved_until(step)
        total = None if self.end is None else self.end.flops
        if self.end is None or total is None:
            return spent
        # The `end` record is right also where a visit was interrupted: its record tells only what came afterwards.
        return total if step >= self.end.steps else min(spent, total)

    def uncached_flops_until(self, step: int) -> int:
        """Counted FLOPs that the first `step` steps cost without a cache: each visit at the cost of its steps."""
        return self.spent_until(step, self.visit_flops) if self.visits else step * self.step_flops(0)

    def spent_until(self, step: Number, cost_of: Callable[[Visit], Number]) -> Number:
        """The sum over the first `step` steps, where one in a visit costs what `cost_of` says."""
        stops = [*(visit.step for visit in self.visits[1:]), step]
        return sum(
            max(min(step, stop) - visit.step, 0) * cost_of(visit)
            for visit, stop in zip(self.visits, stops, strict=True)
        )

    def _flops_saved_until(self, step: int) -> int:
        begun = {visit.visit: visit.step for visit in self.visits}
        saved = 0
        for use in self.cache_uses:
            start = begun.get(use.visit, use.step)
            if step >= use.step:
                saved += use.flops_saved
            elif step > start:
                saved += use.flops_saved * (step - start) // (use.step - start)
        return saved


def _header(event: Event) -> Header:
    blocks = tuple(_typed(BlockInfo, block) for block in event.get("blocks", ()))
    return _typed(Header, {**event, "blocks": blocks})


def _cost(event: Event) -> Cost:
    flops, memory = event["flops"], event["memory"]
    return Cost(
        flops_full=int(flops["full"]),
        flops_blocks=tuple(int(count) for count in flops["blocks"]),
        theory_full=int(flops["theory_full"]),
        theory_blocks=tuple(int(count) for count in flops["theory_blocks"]),
        memory_full=_bytes(memory["full"]),
        memory_blocks=tuple(_bytes(block) for block in memory["blocks"]),
    )


def _tracked(event: Event) -> Tracked:
    full, *blocks = (
        Peak(
            parts=_bytes(peak["parts"]),
            host_bytes=int(peak.get("host_bytes", 0)),
            operation=str(peak.get("operation", "")),
        )
        for peak in (event["full"], *event["blocks"])
    )
    return Tracked(full=full, blocks=tuple(blocks))


def _bytes(parts: Mapping[str, Any]) -> Bytes:
    return {str(part): int(count) for part, count in parts.items()}


def _details(path: Path) -> Mapping[str, Any]:
    """`run.json`, or nothing: a report is about the log, and a lost description must not cost it."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _maybe(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


# How a JSON value becomes a field, by the field's annotation. `float` also reads "nan" and "inf".
_CONVERT: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "str | None": _maybe(str),
    "int | None": _maybe(int),
    "float | None": _maybe(float),
    "tuple[BlockInfo, ...]": tuple,
}


def _typed(cls: type[T], event: Event) -> T:
    values = {}
    for item in fields(cls):  # pyright: ignore[reportArgumentType] - only records come here
        if item.name in event:
            values[item.name] = _CONVERT[str(item.type)](event[item.name])
        elif item.default is MISSING:
            raise KeyError(f"a '{event.get('kind', cls.__name__)}' record without '{item.name}'")
    return cls(**values)


def _all(cls: type[T], events: list[Event] | None) -> list[T]:
    return [_typed(cls, event) for event in events or ()]

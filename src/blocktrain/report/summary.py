"""The figures of a run, typed, and as plain data for machines; `summary_table` shows them to people.

Names tell estimates from measurements: `flops_*` are counted by the profiler; `flops_ratio_theory` is the closed
formula's, which knows no cache; `optimizer_bytes` and `memory` are by arithmetic, `optimizer_bytes_measured` and
`peak_memory_bytes` what the run measured; `cache_seconds_saved` is an estimate, all else about the cache is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from blocktrain.report.cache_totals import totals
from blocktrain.report.run import RunRecord


@dataclass(frozen=True, kw_only=True)
class FlopsFigures:
    """What a step and the run cost in FLOPs; None where the log has no costs.

    `flops_ratio` is the cost of a step over that of a full step, averaged over the blocks, each of which counts once.
    What a prefix cache saved is subtracted, except from `*_uncached` and `flops_excess_percent`, which compares the
    count with the formula. `flops_uncached` and `flops_saved*` are None where no visit was cached.
    """

    flops_full_step: int | None = None
    flops_mean_step: float | None = None
    flops_mean_step_uncached: float | None = None
    flops_ratio: float | None = None
    flops_ratio_uncached: float | None = None
    flops_ratio_theory: float | None = None
    flops_excess_percent: float | None = None
    layers_left_out: int | None = None
    flops: int | None = None
    flops_uncached: int | None = None
    flops_saved: int | None = None
    flops_saved_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class CacheFigures:
    """What the prefix cache did over the run; None where no visit was cached."""

    cache_places: list[str] | None = None
    cache_dtypes: list[str] | None = None
    cache_bytes: int | None = None
    cache_rows: int | None = None
    cache_hit_rate: float | None = None
    cache_stale: int | None = None
    cache_damaged: int | None = None
    cache_fill_seconds: float | None = None
    cache_wait_seconds: float | None = None
    cache_seconds_saved: float | None = None
    cache_encoding_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryFigures:
    """Bytes of a step in a visit to the largest block and in full training (`*_full`), by arithmetic, and what the
    run measured; None for what the log does not have."""

    optimizer_bytes: int | None = None
    optimizer_bytes_full: int | None = None
    memory: dict[str, int] | None = None
    memory_full: dict[str, int] | None = None
    optimizer_bytes_measured: int | None = None
    peak_memory_bytes: int | None = None
    device: str


@dataclass(frozen=True, kw_only=True)
class Summary(FlopsFigures, CacheFigures, MemoryFigures):
    """What a run reached and what it cost; None for what the log does not have or is not finite.

    Losses are in nats: `validation_loss` per token, text or image, `validation_loss_per_byte` per byte of text.
    """

    name: str
    method: str
    model: str
    parameters: int
    blocks: int
    unit: str
    finished: bool
    reason: str | None
    validation_loss: float | None
    validation_loss_per_byte: float | None
    accuracy: float | None
    exact_match: float | None
    exact_match_before: float | None
    steps: int
    visits: int
    tokens: int
    seconds: float
    tokens_per_second: float | None
    skipped_steps: int
    nonfinite_steps: int

    @property
    def is_full(self) -> bool:
        """Whether every parameter was trained at once."""
        return self.method == "full"

    def to_json(self) -> dict[str, Any]:
        """The figures by name, as plain values that JSON can hold; what the run is and reached comes first."""
        values = asdict(self)
        return {**{name: values[name] for name in Summary.__annotations__}, **values}


def summary(run: RunRecord) -> Summary:
    """The figures of `run`."""
    end, last = run.end, run.evaluations[-1] if run.evaluations else None
    return Summary(
        name=run.header.name,
        method=run.header.method,
        model=run.header.model,
        parameters=run.header.parameters,
        blocks=1 if run.is_full else len(run.header.blocks),
        unit=run.header.unit,
        finished=end is not None,
        reason=end.reason if end else None,
        validation_loss=_first_known(end and end.loss, last and last.loss),
        validation_loss_per_byte=_first_known(end and end.loss_per_byte, last and last.loss_per_byte),
        accuracy=_first_known(end and end.accuracy, last and last.accuracy),
        exact_match=_first_known(end and end.exact_match, last and last.exact_match),
        exact_match_before=_first_known(run.evaluations[0].exact_match if run.evaluations else None),
        **vars(_flops(run)),
        **vars(_cache(run)),
        **vars(_memory(run)),
        steps=run.steps_done,
        visits=len(run.visits),
        tokens=run.tokens,
        seconds=run.seconds,
        tokens_per_second=run.tokens / run.seconds if run.seconds > 0 else None,
        skipped_steps=sum(row.skipped for row in run.steps),
        nonfinite_steps=sum(not math.isfinite(row.loss) for row in run.steps),
    )


def summaries_of(runs: Sequence[RunRecord]) -> list[Summary]:
    """The summaries of runs that are compared; a number is added to a name that occurs again."""
    names: list[str] = []
    for run in runs:
        name = alone = run.header.name or run.folder.name
        count = 2
        while name in names:
            name, count = f"{alone} ({count})", count + 1
        names.append(name)
    return [replace(summary(run), name=name) for run, name in zip(runs, names, strict=True)]


def _first_known(*values: float | None) -> float | None:
    known = next((value for value in values if value is not None), None)
    return known if known is not None and math.isfinite(known) else None


def _flops(run: RunRecord) -> FlopsFigures:
    if run.cost is None:
        return FlopsFigures()
    step = run.cost.flops
    counted = [step.full] if run.is_full else list(step.blocks) or [step.full]
    formula = [step.theory_full] if run.is_full else list(step.theory_blocks) or [step.theory_full]
    uncached = sum(counted) / len(counted)
    mean = sum(run.mean_step_flops(block) for block in range(len(counted))) / len(counted)
    ratio = uncached / step.full if step.full else None
    theory = sum(formula) / len(formula) / step.theory_full if step.theory_full else None
    spent, spent_uncached = run.flops_until(run.steps_done), run.uncached_flops_until(run.steps_done)
    saved = spent_uncached - spent
    cached = bool(run.cache_uses)
    return FlopsFigures(
        flops_full_step=step.full,
        flops_mean_step=mean,
        flops_mean_step_uncached=uncached,
        flops_ratio=mean / step.full if step.full else None,
        flops_ratio_uncached=ratio,
        flops_ratio_theory=theory,
        flops_excess_percent=100 * (ratio / theory - 1) if ratio and theory else None,
        layers_left_out=max((visit.left_out for visit in run.visits), default=0),
        flops=spent,
        flops_uncached=spent_uncached if cached else None,
        flops_saved=saved if cached else None,
        flops_saved_share=saved / spent_uncached if cached and spent_uncached else None,
    )


def _cache(run: RunRecord) -> CacheFigures:
    if not run.cache_uses:
        return CacheFigures()
    figures = totals(run.cache_uses)
    return CacheFigures(
        cache_places=list(figures.places),
        cache_dtypes=list(figures.dtypes),
        cache_bytes=figures.bytes,
        cache_rows=figures.rows,
        cache_hit_rate=figures.hit_rate,
        cache_stale=figures.stale,
        cache_damaged=figures.damaged,
        cache_fill_seconds=_first_known(figures.fill_seconds),
        cache_wait_seconds=_first_known(figures.wait_seconds),
        cache_seconds_saved=_first_known(figures.seconds_saved),
        cache_encoding_error=_first_known(figures.encoding_error),
    )


def _memory(run: RunRecord) -> MemoryFigures:
    measured = MemoryFigures(
        optimizer_bytes_measured=run.end.optimizer_bytes if run.end else None,
        peak_memory_bytes=run.end.peak_memory_bytes if run.end else None,
        device=run.header.device,
    )
    if run.cost is None:
        return measured
    full = run.cost.memory.full
    blocks = [full] if run.is_full else list(run.cost.memory.blocks) or [full]
    return replace(
        measured,
        optimizer_bytes=max(block.get("moments", 0) for block in blocks),
        optimizer_bytes_full=full.get("moments", 0),
        memory=dict(max(blocks, key=lambda block: sum(block.values()))),
        memory_full=dict(full),
    )

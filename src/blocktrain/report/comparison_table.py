"""The table of a comparison: loss at equal tokens and at equal time, cost of a step, memory, B-F multiplier.

A multiplier compares runs with the same optimizer, because a better optimizer is not the merit of block coordinate
descent. The multiplier against a full run with another optimizer has a column of its own.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from blocktrain.plan.cost import price_of
from blocktrain.records.run_records import Evaluation
from blocktrain.report.format import ABSENT, decimal, flops_text
from blocktrain.report.multiplier import loss_of, tokens_to_reach
from blocktrain.report.run import RunRecord
from blocktrain.units import format_bytes

T = TypeVar("T")
ReadLoss = Callable[[Evaluation], float]


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """The figures of one run of a comparison; None for what the logs do not have.

    loss: at the end.
    loss_at_equal_time: interpolated at the time at which the fastest run ended.
    seconds: of training, without the preparation before the first evaluation.
    step_seconds: the median of the steps without an evaluation; step_ratio: that over the first full run's.
    peak_bytes: tracked, of the worst step.
    multiplier: tokens to the final loss of the full run with the same optimizer, over the tokens of that run.
    cross_multiplier: likewise against the first full run, where that has another optimizer.
    usd: the price of `seconds`.
    """

    name: str
    method: str
    optimizer: str
    loss: float | None
    loss_at_equal_time: float | None
    flops: int
    seconds: float
    step_seconds: float | None
    step_ratio: float | None
    peak_bytes: int | None
    optimizer_bytes: int | None
    multiplier: float | None
    cross_multiplier: float | None
    usd: float | None


def comparison_rows(
    runs: Sequence[RunRecord], names: Sequence[str], *, usd_per_hour: Decimal | None = None
) -> list[ComparisonRow]:
    """A row for each run, in the order given. usd_per_hour: the price of a card, which this machine's seconds cost."""
    _, read = loss_of(runs)
    fulls = [run for run in runs if run.is_full and run.evaluations]
    shortest = min(map(_training_seconds, runs))
    result = []
    for run, name in zip(runs, names, strict=True):
        same = next((full for full in fulls if full.header.optimizer == run.header.optimizer), None)
        seconds, step = _training_seconds(run), _step_seconds(run)
        first = _step_seconds(fulls[0]) if fulls else None
        tracked = run.memory_peaks
        peaks = () if tracked is None else [tracked.full] if run.is_full else tracked.blocks
        result.append(
            ComparisonRow(
                name=name,
                method=run.header.method,
                optimizer=run.header.optimizer,
                loss=read(run.evaluations[-1]) if run.evaluations else None,
                loss_at_equal_time=_loss_at(run, shortest, read),
                flops=run.flops_until(run.steps_done),
                seconds=seconds,
                step_seconds=step,
                step_ratio=step / first if step and first else None,
                peak_bytes=None if not peaks else max(sum(peak.parts.values()) for peak in peaks),
                optimizer_bytes=run.end.optimizer_bytes if run.end else None,
                multiplier=_multiplier(run, same, read),
                cross_multiplier=None if same or not fulls else _multiplier(run, fulls[0], read),
                usd=None if usd_per_hour is None else float(price_of(seconds, 1, usd_per_hour).amount),
            )
        )
    return result


def _training_seconds(run: RunRecord) -> float:
    return run.seconds - (run.evaluations[0].seconds if run.evaluations else 0.0)


def _step_seconds(run: RunRecord) -> float | None:
    """The median time between two steps, where no evaluation and no switch of blocks came between them."""
    interrupted = {row.step for row in (*run.evaluations, *run.visits)}
    spent = [
        after.seconds - before.seconds
        for before, after in itertools.pairwise(run.steps)
        if after.step == before.step + 1 and before.step not in interrupted
    ]
    return statistics.median(spent) if spent else None


def _loss_at(run: RunRecord, seconds: float, read: ReadLoss) -> float | None:
    """The validation loss after `seconds` of training, interpolated between the evaluations before and after it."""
    rows = run.evaluations
    if not rows:
        return None
    for before, after in itertools.pairwise(rows):
        start, stop = (row.seconds - rows[0].seconds for row in (before, after))
        if start <= seconds <= stop and stop > start:
            return read(before) + (seconds - start) / (stop - start) * (read(after) - read(before))
    return read(rows[-1])


def _multiplier(run: RunRecord, full: RunRecord | None, read: ReadLoss) -> float | None:
    if full is None or run is full or not full.evaluations[-1].tokens:
        return None
    needed = tokens_to_reach(read(full.evaluations[-1]), [(row.tokens, read(row)) for row in run.evaluations])
    return None if needed is None else needed / full.evaluations[-1].tokens


def comparison_table(found: Sequence[ComparisonRow], *, card: str | None = None) -> Table:
    """The table for a terminal: a line for each run."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    headings = ["", "loss", "same time", "FLOPs", "of step", "peak", "state", "B-F", "cross"]
    headings += [f"$, {card}"] if card else []
    for index, heading in enumerate(headings):
        result.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for item in found:
        cells = [
            item.name,
            _shown(item.loss, decimal),
            _shown(item.loss_at_equal_time, decimal),
            flops_text(item.flops).removesuffix("LOP"),
            _shown(item.step_ratio, decimal),
            _shown(item.peak_bytes, format_bytes).removesuffix("iB"),
            _shown(item.optimizer_bytes, format_bytes).removesuffix("iB"),
            _shown(item.multiplier, decimal),
            _shown(item.cross_multiplier, decimal),
        ]
        result.add_row(*map(Text, [*cells, *([_shown(item.usd, "{:.4f}".format)] if card else [])]))
    return result


def _shown(value: T | None, show: Callable[[T], str]) -> str:
    return ABSENT if value is None else show(value)

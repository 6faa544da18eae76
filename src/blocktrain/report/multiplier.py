"""The measured B-F multiplier: how many times the tokens of full training block coordinate descent needs, to reach
the same validation loss (paper section 4.2.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blocktrain.records.run_records import Evaluation
from blocktrain.report.format import decimal
from blocktrain.report.run import RunRecord
from blocktrain.units import format_count


@dataclass(frozen=True, kw_only=True)
class MeasuredMultiplier:
    """The runs `full` and `bcd` by name, and the tokens that each took to the full run's final validation loss;
    `bcd_tokens` is None where the BCD run did not reach it."""

    full: str
    bcd: str
    loss: float
    full_tokens: int
    bcd_tokens: float | None

    @property
    def value(self) -> float | None:
        """The B-F multiplier: BCD's tokens over full training's."""
        return None if self.bcd_tokens is None else self.bcd_tokens / self.full_tokens


def loss_of(runs: Sequence[RunRecord]) -> tuple[str, Callable[[Evaluation], float]]:
    """The unit of loss that all runs have, and the function that reads it from an evaluation. Losses per byte also
    compare runs with different tokenizers."""
    found = [row for run in runs for row in run.evaluations]
    if found and all(row.loss_per_byte is not None for row in found):
        return "nats per byte", lambda row: math.nan if row.loss_per_byte is None else row.loss_per_byte
    return f"nats per {runs[0].header.unit.removesuffix('s')}", lambda row: row.loss


def multipliers(runs: Sequence[RunRecord], names: Sequence[str]) -> list[MeasuredMultiplier]:
    """The B-F multiplier of every BCD run against the first full run with the same optimizer, where there is one.

    The crossing is interpolated between the evaluations before and after it, so that it does not depend on how often
    a run is evaluated.
    """
    _, read = loss_of(runs)
    named = list(zip(runs, names, strict=True))
    fulls = [(run, name) for run, name in named if run.is_full and run.evaluations]
    return [
        MeasuredMultiplier(
            full=full_name,
            bcd=name,
            loss=read(full.evaluations[-1]),
            full_tokens=full.evaluations[-1].tokens,
            bcd_tokens=tokens_to_reach(
                read(full.evaluations[-1]), [(row.tokens, read(row)) for row in run.evaluations]
            ),
        )
        for run, name in named
        if run.header.method in ("bcd", "uncached")
        for full, full_name in [item for item in fulls if item[0].header.optimizer == run.header.optimizer][:1]
        if math.isfinite(read(full.evaluations[-1])) and full.evaluations[-1].tokens > 0
    ]


def tokens_to_reach(target: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """The tokens at which a curve of (tokens, loss) first comes down to `target`; None if it never does.

    >>> tokens_to_reach(2.5, [(0, 4.0), (100, 3.0), (200, 2.0)])
    150.0
    """
    before: tuple[float, float] | None = None
    for tokens, loss in curve:
        if loss <= target:
            if before is None or before[1] <= loss:
                return float(tokens)
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (tokens - before[0])
        before = (tokens, loss) if math.isfinite(loss) else before
    return None


def multipliers_text(items: Sequence[MeasuredMultiplier], unit: str, loss_unit: str) -> str:
    """The B-F multipliers of a comparison in words: a sentence for one, a list for several."""
    if len(items) == 1:
        return multiplier_text(items[0], unit, loss_unit)
    first = items[0]
    values = [f"{item.bcd} " + ("not reached" if item.value is None else f"{item.value:.2f}") for item in items]
    return (
        f"B-F multipliers against {first.full}, which ended at {decimal(first.loss)} {loss_unit} after "
        f"{format_count(first.full_tokens)} {unit}: {'; '.join(values)}."
    )


def multiplier_text(item: MeasuredMultiplier, unit: str, loss_unit: str) -> str:
    """One B-F multiplier in words."""
    goal = f"{item.full}'s final validation loss of {decimal(item.loss)} {loss_unit}"
    if item.bcd_tokens is None or item.value is None:
        return f"{item.bcd}: B-F multiplier not reached; the run did not come down to {goal}."
    return (
        f"{item.bcd}: B-F multiplier {item.value:.2f}; it reached {goal} after {format_count(item.bcd_tokens)} {unit}, "
        f"{item.full} after {format_count(item.full_tokens)}."
    )

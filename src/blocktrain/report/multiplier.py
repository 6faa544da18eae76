"""The B-F multiplier: tokens block coordinate descent needs over tokens full training needs, to the same loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blocktrain.report.format import decimal
from blocktrain.report.records import Evaluation
from blocktrain.report.run import RunRecord
from blocktrain.units import format_count


@dataclass(frozen=True, kw_only=True)
class Multiplier:
    """Tokens a BCD run needs to reach a full run's final validation loss (paper 4.2.3); None where it did not."""

    full: str
    bcd: str
    loss: float
    full_tokens: int
    bcd_tokens: float | None

    @property
    def value(self) -> float | None:
        """The B-F multiplier: BCD's tokens over full training's."""
        return None if self.bcd_tokens is None else self.bcd_tokens / self.full_tokens


def per_byte(runs: Sequence[RunRecord]) -> bool:
    """Whether every evaluation of every run has a loss per byte, the one that different tokenizers share."""
    found = [row for run in runs for row in run.evaluations]
    return bool(found) and all(row.loss_per_byte is not None for row in found)


def loss_of(runs: Sequence[RunRecord]) -> tuple[str, Callable[[Evaluation], float]]:
    """The unit that the runs share, and how to read it."""
    if per_byte(runs):
        return "nats per byte", lambda row: math.nan if row.loss_per_byte is None else row.loss_per_byte
    return f"nats per {runs[0].header.unit.removesuffix('s')}", lambda row: row.loss


def multipliers(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Multiplier]:
    """The B-F multiplier of every BCD run against the first full run with the same optimizer; none without one of each.

    The crossing is interpolated between the two evaluations around it, so that it does not depend on how often a
    run is evaluated.
    """
    _, read = loss_of(runs)
    named = list(zip(runs, names, strict=True))
    fulls = [(run, name) for run, name in named if run.is_full and run.evaluations]
    return [
        Multiplier(
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
    """Tokens at which a curve of (tokens, loss) first comes down to `target`; None if it does not.

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


def multipliers_text(items: Sequence[Multiplier], unit: str, loss_unit: str) -> str:
    """The B-F multipliers of a comparison in words: a sentence for one, a list for several."""
    if len(items) == 1:
        return multiplier_text(items[0], unit, loss_unit)
    first = items[0]
    told = [f"{item.bcd} " + ("not reached" if item.value is None else f"{item.value:.2f}") for item in items]
    return (
        f"B-F multipliers against {first.full}, which ended at {decimal(first.loss)} {loss_unit} after "
        f"{format_count(first.full_tokens)} {unit}: {'; '.join(told)}."
    )


def multiplier_text(item: Multiplier, unit: str, loss_unit: str) -> str:
    """One B-F multiplier in words."""
    goal = f"{item.full}'s final validation loss of {decimal(item.loss)} {loss_unit}"
    if item.bcd_tokens is None or item.value is None:
        return f"{item.bcd}: B-F multiplier not reached; it did not come down to {goal}."
    return (
        f"{item.bcd}: B-F multiplier {item.value:.2f}; it reached {goal} after {format_count(item.bcd_tokens)} {unit}, "
        f"{item.full} after {format_count(item.full_tokens)}."
    )

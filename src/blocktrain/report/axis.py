"""The axes of a chart: a range, and ticks at round numbers with a unit.

The range of a loss axis shows what one reads; it does not make room for a spike or for the steep start of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from blocktrain.report.format import flops_text, format_small
from blocktrain.units import format_count


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear axis: what it measures, its range and its ticks as (value, text)."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        """The place of `value` along the axis: 0 at the low end, 1 at the high end. Far outside is as invisible as just
        outside, so the place is from -1 to 2."""
        return min(max((value - self.low) / (self.high - self.low), -1.0), 2.0)


def tick_values(low: float, high: float, count: int) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten within the range.

    >>> tick_values(0, 900, 5)
    [0.0, 200.0, 400.0, 600.0, 800.0]
    """
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) if step < 1e3 else float(n * step) for n in range(first, last + 1)]


def axis(label: str, low: float, high: float, *, count: int = 8, text: Callable[[float], str] | None = None) -> Axis:
    """An axis from `low` to `high`; without `text`, ticks have as many decimals as tell them apart."""
    if not math.isfinite(high - low):
        low, high = 0.0, 1.0
    if high <= low:  # a single step or a constant: any range around it will do
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, low + spread
    values = tick_values(low, high, count)
    if text is None:
        gap = values[1] - values[0] if len(values) > 1 else abs(values[0]) or 1.0
        digits = max(0, -math.floor(math.log10(gap) + 1e-9))
        text = format_small if digits > 2 else lambda value: f"{value:.{digits}f}"
    return Axis(label=label, low=low, high=high, ticks=tuple((value, text(value)) for value in values))


def padded(label: str, values: list[float], *, count: int = 5) -> Axis:
    """An axis around the finite values, with a little air at both ends."""
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    air = (high - low) * 0.06
    return axis(label, low - air, high + air, count=count)


def count_axis(label: str, high: float) -> Axis:
    """Tokens or images from 0 to `high`."""
    return axis(label, 0.0, max(high, 1.0), text=format_count)


def flops_axis(label: str, high: float) -> Axis:
    """FLOPs from 0 to `high`."""
    return axis(label, 0.0, max(high, 1.0), count=5, text=lambda value: "0" if value == 0 else flops_text(value)[:-4])


def time_axis(high_seconds: float) -> tuple[Axis, float]:
    """An axis for wall time in the unit that suits its length, and how many seconds that unit has."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)):
        if high_seconds >= 3 * size or size == 1.0:
            return axis(f"wall time, {unit}", 0.0, max(high_seconds, 1e-3) / size), size
    raise AssertionError("seconds fit any length")


FEW = 20  # points; with fewer there is no steep start to cut off
START = 0.04  # share of a run's tokens in which the loss falls steeply


def without_start(
    label: str,
    points: Sequence[tuple[float, float]],
    end: float,
    more: Sequence[float] = (),
    late: Sequence[float] = (),
) -> Axis:
    """An axis for (tokens, loss) `points` up to `end` tokens, and for the losses `more`; `late` are those of `more`
    that come after the start.

    The steep start is cut off where it would press the rest, which is what one reads, into less than two thirds of
    the height.
    """
    everything = [*more, *(loss for _, loss in points)]
    rest = [*late, *(loss for tokens, loss in points if tokens > START * end)]
    finite = [[value for value in values if math.isfinite(value)] for values in (rest, everything)]
    less, all_of_it = (max(values) - min(values) if values else math.inf for values in finite)
    cut = len(points) >= FEW and less < all_of_it * 0.66
    return padded(label, rest if cut else everything)


def typical_range(values: Sequence[float]) -> list[float]:
    """The range in which nearly all values lie, as (low, high), so that one spike does not flatten the rest; empty
    where no value is finite."""
    finite = [value for value in values if math.isfinite(value)]
    return np.quantile(finite, [0.002, 0.998]).tolist() if finite else []

"""How a report writes numbers, and where an axis puts its ticks: always at round numbers, always with a unit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from blocktrain.units import format_count, format_seconds

ABSENT = "–"


def flops_text(count: float) -> str:
    """`flops_text(1.24e12) == '1.24 TFLOP'`; one multiply-add is two; a true minus sign."""
    value, prefix = float(count), ""
    for following in "kMGTPEZY":
        if abs(value) < 999.5:  # what .3g would write as 1e+03
            break
        value, prefix = value / 1000, following
    return f"{value:.3g} {prefix}FLOP".replace("-", "−")


def seconds_text(seconds: float) -> str:
    """`seconds_text(0.0042) == '4.2ms'`, `seconds_text(-75) == '−1m 15s'`: short and negative times, too."""
    size = abs(seconds)
    return ("−" if seconds < 0 else "") + (f"{size * 1000:.3g}ms" if size < 0.9995 else format_seconds(size))


def decimal(value: float | None, digits: int = 3) -> str:
    """Fixed digits; a dash for what was not measured, `nan` for what is not a number."""
    return ABSENT if value is None else f"{value:.{digits}f}"


def alike(first: float, second: float) -> bool:
    """Whether two figures agree to three digits: `alike(3.5200, 3.5203)`, not `alike(3.52, 3.53)`."""
    return math.isclose(first, second, rel_tol=5e-4)


def percent(share: float) -> str:
    """`percent(0.6652) == '67 %'`, `percent(0.0071) == '0.71 %'`; a true minus sign."""
    size = abs(share) * 100
    digits = 0 if size >= 10 or size == 0 else 1 if size >= 1 else 2
    return f"{share * 100:.{digits}f} %".replace("-", "−")


def plural(count: int, noun: str) -> str:
    """`plural(1, 'step') == '1 step'`, `plural(1200, 'step') == '1,200 steps'`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear axis: what it measures, its range and its ticks as (value, text)."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        """Where `value` lies: 0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low)


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
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = 0.0, 1.0
    if high <= low:  # a single step, a constant: any range around it will do
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, low + spread
    values = tick_values(low, high, count)
    if text is None:
        gap = values[1] - values[0] if len(values) > 1 else abs(values[0]) or 1.0
        digits = max(0, -math.floor(math.log10(gap) + 1e-9))
        text = format_small if digits > 2 else lambda value: f"{value:.{digits}f}"
    return Axis(label=label, low=low, high=high, ticks=tuple((value, text(value)) for value in values))


def format_small(value: float) -> str:
    """`format_small(2e-05) == '2e-5'`: learning rates as people write them."""
    if value == 0 or abs(value) >= 1e-3 or not math.isfinite(value):
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def padded(label: str, values: list[float], *, count: int = 5) -> Axis:
    """An axis around the finite ones of `values` with a little air at both ends."""
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
    """Wall time in the unit that suits its length; also the seconds in that unit."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)):
        if high_seconds >= 3 * size or size == 1.0:
            return axis(f"wall time, {unit}", 0.0, max(high_seconds, 1e-3) / size), size
    raise AssertionError("seconds fit any length")

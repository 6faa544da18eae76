"""How a report writes numbers: always with a unit, in as many digits as a reader needs."""

from __future__ import annotations

import math

from blocktrain.units import format_seconds

ABSENT = "–"


def flops_text(count: float) -> str:
    """`flops_text(1.24e12) == '1.24 TFLOP'`; a multiply-add counts as two; with a true minus sign."""
    value, prefix = float(count), ""
    for following in "kMGTPEZY":
        if abs(value) < 999.5:  # what .3g would write as 1e+03
            break
        value, prefix = value / 1000, following
    return f"{value:.3g} {prefix}FLOP".replace("-", "−")


def seconds_text(seconds: float) -> str:
    """`seconds_text(0.0042) == '4.2ms'`, `seconds_text(-75) == '−1m 15s'`; with a true minus sign."""
    size = abs(seconds)
    return ("−" if seconds < 0 else "") + (f"{size * 1000:.3g}ms" if size < 0.9995 else format_seconds(size))


def decimal(value: float | None, digits: int = 3) -> str:
    """A number with a fixed count of digits; a dash for what was not measured, `nan` for what is not a number."""
    return ABSENT if value is None else f"{value:.{digits}f}"


def agree(first: float, second: float) -> bool:
    """Whether two figures agree to three digits: 3.5200 and 3.5203 do, 3.52 and 3.53 do not."""
    return math.isclose(first, second, rel_tol=5e-4)


def percent(share: float) -> str:
    """`percent(0.6652) == '67 %'`, `percent(0.0071) == '0.71 %'`; with a true minus sign."""
    size = abs(share) * 100
    digits = 0 if size >= 10 or size == 0 else 1 if size >= 1 else 2
    return f"{share * 100:.{digits}f} %".replace("-", "−")


def plural(count: int, noun: str) -> str:
    """`plural(1, 'step') == '1 step'`, `plural(1200, 'step') == '1,200 steps'`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_small(value: float) -> str:
    """`format_small(2e-05) == '2e-5'`: a learning rate as people write it."""
    if value == 0 or abs(value) >= 1e-3 or not math.isfinite(value):
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"

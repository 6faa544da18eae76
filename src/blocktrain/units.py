"""Quantities with units: durations, money, and bytes, counts and seconds as people write them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from blocktrain.errors import ConfigError

Unit = Literal["steps", "tokens", "epochs"]

LONGEST = 1e15  # steps, tokens or epochs
_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_NUMBER = r"[0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"
_QUANTITY = re.compile(rf"^\s*({_NUMBER})\s*([kmbgt]?)\s*(step|token|epoch)s?\s*$", re.I)


@dataclass(frozen=True, kw_only=True)
class BatchGeometry:
    """What one optimizer step consumes, by which tokens and epochs are converted to steps. For images, a token is one
    image."""

    tokens_per_step: int
    rows_per_step: int
    rows_per_epoch: int


@dataclass(frozen=True)
class Duration:
    """A length of training, in steps, tokens or epochs: one quantity instead of three competing maxima.

    >>> Duration.parse("1.5M tokens")
    Duration(value=1500000.0, unit='tokens')
    >>> Duration.steps(100).in_steps(BatchGeometry(tokens_per_step=512, rows_per_step=4, rows_per_epoch=40))
    100
    >>> Duration.epochs(2).in_steps(BatchGeometry(tokens_per_step=512, rows_per_step=4, rows_per_epoch=42))
    21
    """

    value: float
    unit: Unit

    def __post_init__(self) -> None:
        if not 0 < self.value <= LONGEST:
            raise ConfigError(
                f"a duration must be a positive number of at most {LONGEST:g}, not {self.value:g} {self.unit}"
            )

    @classmethod
    def steps(cls, value: float) -> Duration:
        """`value` optimizer steps."""
        return cls(value, "steps")

    @classmethod
    def tokens(cls, value: float) -> Duration:
        """`value` training tokens (for an image model, images)."""
        return cls(value, "tokens")

    @classmethod
    def epochs(cls, value: float) -> Duration:
        """`value` passes over the training rows."""
        return cls(value, "epochs")

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read `"100 steps"`, `"1.5M tokens"` or `"2 epochs"`; raises `ConfigError` for anything else."""
        match = _QUANTITY.match(text)
        if match is None:
            raise ConfigError(f"'{text}' is not a duration; write for example '100 steps', '1.5M tokens' or '2 epochs'")
        number, suffix, unit = match.groups()
        units: dict[str, Unit] = {"step": "steps", "token": "tokens", "epoch": "epochs"}
        return cls(float(number.replace("_", "")) * _SUFFIX[suffix.lower()], units[unit.lower()])

    def in_steps(self, geometry: BatchGeometry) -> int:
        """The number of optimizer steps, rounded up and at least one."""
        match self.unit:
            case "steps":
                steps = self.value
            case "tokens":
                steps = self.value / geometry.tokens_per_step
            case "epochs":
                steps = self.value * geometry.rows_per_epoch / geometry.rows_per_step
        return max(1, math.ceil(steps - 1e-9))

    def __str__(self) -> str:
        return f"{format_count(self.value)} {self.unit}"


_COUNT = re.compile(rf"^\s*({_NUMBER})\s*([kmbgt]?)(?:\s*tokens?)?\s*$", re.I)
_MONEY = re.compile(r"^\s*(?:\$|usd)?\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*(k?)\s*(?:usd|dollars?)?\s*$", re.I)
_SPAN = re.compile(rf"^\s*({_NUMBER})\s*(s|m|min|h|d|w)(?:ours?|ays?|eeks?|inutes?|econds?)?\s*$", re.I)
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True, order=True)
class Dollars:
    """US dollars. Amounts and products are decimal, so nothing is lost to binary rounding.

    >>> str(Dollars.parse("500usd")), str(Dollars.parse("$0.29") * 8), str(Dollars(Decimal("1234567")))
    ('$500', '$2.32', '$1,234,567')
    """

    amount: Decimal

    @classmethod
    def parse(cls, text: str) -> Dollars:
        """Read `"500usd"`, `"$0.29"` or `"1.5k"`; raises `ConfigError` for anything else."""
        match = _MONEY.match(text)
        if match is None:
            raise ConfigError(f"'{text}' is not an amount of money; write for example '500usd' or '$0.29'")
        number, thousand = match.groups()
        return cls(Decimal(number.replace(",", "").replace("_", "")) * (1000 if thousand else 1))

    def __mul__(self, factor: float | Decimal) -> Dollars:
        return Dollars(self.amount * Decimal(str(factor)))

    def __str__(self) -> str:
        whole = abs(self.amount) >= 100 or self.amount == self.amount.to_integral_value()
        return f"${self.amount:,.0f}" if whole else f"${self.amount:,.2f}"


def parse_tokens(text: str) -> int:
    """A number of tokens: `parse_tokens("10B") == 10_000_000_000`. Raises `ConfigError` for anything but a positive
    count."""
    match = _COUNT.match(text)
    count = float(match[1].replace("_", "")) * _SUFFIX[match[2].lower()] if match else 0.0
    if not 1 <= count < math.inf:
        raise ConfigError(f"'{text}' is not a number of tokens; write for example '10B', '1.5M' or '20000'")
    return round(count)


def parse_bytes(text: str) -> int:
    """A size of memory, in binary units as makers of cards count: `parse_bytes("24GB") == parse_bytes("24GiB")`, which
    is 24 * 2**30. Raises `ConfigError` for anything else."""
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([kmgt])i?b\s*", text, re.I)
    size = float(match[1].replace("_", "")) * 1024 ** ("kmgt".index(match[2].lower()) + 1) if match else 0.0
    if not 1 <= size < math.inf:
        raise ConfigError(f"'{text}' is not a size of memory; write for example '24GB' or '500MB'")
    return round(size)


def parse_span(text: str) -> float:
    """Seconds of wall time: `parse_span("3d") == 259200.0`, `parse_span("90 min") == 5400.0`. Raises `ConfigError` for
    anything else."""
    match = _SPAN.match(text)
    seconds = float(match[1].replace("_", "")) * _SECONDS[match[2].lower()] if match else 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(f"'{text}' is not a span of time; write for example '3d', '12h' or '90min'")
    return seconds


def format_bytes(count: float) -> str:
    """Binary units: `format_bytes(3 * 2**20) == '3.0 MiB'`."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def format_count(count: float) -> str:
    """Decimal units: `format_count(1_500_000) == '1.5M'`, `format_count(100) == '100'`."""
    if abs(count) >= 1e4:
        count = float(f"{count:.3g}")  # rounded first, so that 999,999 is 1M and not 1000k
    for size, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(count) >= size:
            scaled = count / (1e3 if suffix == "k" else size)
            return f"{scaled:g}{suffix}"
    return f"{count:g}"


def format_seconds(seconds: float) -> str:
    """`format_seconds(3725) == '1h 02m'`, `format_seconds(75) == '1m 15s'`, `format_seconds(2.5) == '2.5s'`."""
    if not math.isfinite(seconds):  # from a damaged log
        return f"{seconds}s"
    if round(seconds) < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m"

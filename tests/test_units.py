"""Durations are read, converted and printed; quantities are printed as people read them."""

from __future__ import annotations

import re

import pytest

from blocktrain.errors import ConfigError
from blocktrain.units import (
    BatchGeometry,
    Dollars,
    Duration,
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_span,
    parse_tokens,
)

PACE = BatchGeometry(tokens_per_step=512, rows_per_step=4, rows_per_epoch=42)


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("100 steps", Duration.steps(100)),
        ("1 step", Duration.steps(1)),
        ("1_000 steps", Duration.steps(1000)),
        ("  2k Steps ", Duration.steps(2000)),
        ("1.5M tokens", Duration.tokens(1_500_000)),
        ("2B tokens", Duration.tokens(2e9)),
        ("2G tokens", Duration.tokens(2e9)),
        ("1T tokens", Duration.tokens(1e12)),
        ("1e6 tokens", Duration.tokens(1e6)),
        ("1e+6 tokens", Duration.tokens(1e6)),
        ("5e-05 epochs", Duration.epochs(5e-5)),
        ("0.5 epochs", Duration.epochs(0.5)),
    ],
)
def test_reads_a_duration(text: str, duration: Duration):
    assert Duration.parse(text) == duration


@pytest.mark.parametrize("text", ["", "100", "steps", "100 stpes", "-5 steps", "1,000 steps", "ten steps", "3 steps 4"])
def test_what_is_no_duration_is_named_with_examples(text: str):
    with pytest.raises(ConfigError, match=re.escape(f"'{text}' is not a duration; write for example '100 steps'")):
        Duration.parse(text)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_duration_is_positive_and_finite(value: float):
    with pytest.raises(ConfigError, match="a duration must be a positive number"):
        Duration.steps(value)


@pytest.mark.parametrize("text", ["0 steps", "1e400 steps"])
def test_a_written_duration_is_positive_and_finite(text: str):
    with pytest.raises(ConfigError, match="a duration must be a positive number"):
        Duration.parse(text)


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        (Duration.steps(100), 100),
        (Duration.steps(0.2), 1),
        (Duration.tokens(1), 1),
        (Duration.tokens(5120), 10),
        (Duration.tokens(5121), 11),
        (Duration.epochs(2), 21),
        (Duration.epochs(1), 11),
        (Duration.epochs(4 / 42), 1),  # a whole step, in floating point a little more
    ],
)
def test_steps_are_rounded_up_and_at_least_one(duration: Duration, steps: int):
    assert duration.in_steps(PACE) == steps


def test_a_duration_prints_briefly():
    assert [str(Duration.steps(100)), str(Duration.tokens(1.5e6)), str(Duration.epochs(0.5))] == [
        "100 steps",
        "1.5M tokens",
        "0.5 epochs",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (1023, "1023"),
        (9999, "9999"),
        (12_345, "12.3k"),
        (999_499, "999k"),
        (999_999, "1M"),  # not 1000k, not 1e+03k
        (1_500_000, "1.5M"),
        (999_600_000, "1G"),
        (7e12, "7T"),
        (2.5e15, "2.5P"),
        (-1_500_000, "-1.5M"),
    ],
)
def test_counts(count: float, text: str):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (2.5 * 2**30, "2.5 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes(count: float, text: str):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5, "2.5s"),
        (42.4, "42s"),
        (59.7, "1m 00s"),
        (75, "1m 15s"),
        (3599.7, "1h 00m"),
        (3725, "1h 02m"),
        (997200, "277h 00m"),
    ],
)
def test_seconds(seconds: float, text: str):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "tokens"), [("10B", 10**10), ("1.5M", 1_500_000), ("20000", 20_000), ("2k tokens", 2000), ("1e9", 10**9)]
)
def test_tokens_are_read(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["10 bananas", "", "-3", "0", "B"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a number of tokens"):
        parse_tokens(text)


def test_money_is_exact() -> None:
    assert Dollars.parse("500usd") == Dollars.parse("$500") == Dollars.parse("0.5k")
    assert (Dollars.parse("$0.1") * 3).amount == Dollars.parse("0.3").amount
    with pytest.raises(ConfigError, match="is not an amount of money"):
        Dollars.parse("lots")


def test_sizes_of_memory_are_read() -> None:
    assert parse_bytes("24GB") == parse_bytes("24 gib") == 24 * 2**30
    assert parse_bytes("1.5M" + "iB") == 1.5 * 2**20
    for text in ("", "24", "GB", "-1GB", "1e999GB", "24 GBytes"):
        with pytest.raises(ConfigError, match=r"is not a size of memory; write for example '24GB'"):
            parse_bytes(text)


def test_spans_are_read() -> None:
    assert [parse_span(text) for text in ("3d", "12h", "90min", "2 days", "1w")] == [
        259200,
        43200,
        5400,
        172800,
        604800,
    ]
    with pytest.raises(ConfigError, match="is not a span of time"):
        parse_span("soon")

"""Ticks at round numbers, and numbers as people write them."""

import doctest
import math

import pytest

from blocktrain.report import format
from blocktrain.report.format import (
    alike,
    axis,
    flops_text,
    format_small,
    padded,
    percent,
    seconds_text,
    tick_values,
    time_axis,
)


def test_examples_in_docstrings():
    assert doctest.testmod(format).failed == 0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1000, [0, 200, 400, 600, 800, 1000]),
        (1.83, 2.61, [2.0, 2.2, 2.4, 2.6]),
        (-0.5, 0.5, [-0.4, -0.2, 0.0, 0.2, 0.4]),
        (0, 3.6e12, [0, 1e12, 2e12, 3e12]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, expected: list[float]):
    assert tick_values(low, high, 5) == pytest.approx(expected)


def test_tick_texts_tell_values_apart():
    assert [text for _, text in axis("loss", 1.98, 2.04, count=5).ticks] == ["1.98", "2.00", "2.02", "2.04"]
    assert [text for _, text in axis("rate", 0, 3e-5, count=3).ticks] == ["0", "1e-5", "2e-5", "3e-5"]


@pytest.mark.parametrize("values", [[], [2.0], [2.0, 2.0], [math.nan], [math.inf, 1.0], [0.0, 0.0]])
def test_an_axis_exists_for_any_values(values: list[float]):
    made = padded("loss", values)
    assert math.isfinite(made.low)
    assert made.low < made.high
    assert made.ticks


@pytest.mark.parametrize(
    ("seconds", "unit"), [(0, "seconds"), (150, "seconds"), (200, "minutes"), (20_000, "hours"), (400_000, "days")]
)
def test_time_is_told_in_the_unit_that_suits_it(seconds: float, unit: str):
    made, size = time_axis(seconds)
    assert made.label == f"wall time, {unit}"
    assert made.high * size == pytest.approx(max(seconds, 1e-3))


def test_quantities_in_words():
    assert flops_text(950) == "950 FLOP"
    assert flops_text(1.24e12) == "1.24 TFLOP"
    assert flops_text(999_700) == "1 MFLOP"
    assert flops_text(3.1e21) == "3.1 ZFLOP"
    assert percent(0.6652) == "67 %"
    assert percent(-0.012) == "−1.2 %"
    assert percent(0.00713) == "0.71 %"
    assert format_small(2e-5) == "2e-5"
    assert format_small(0.000277) == "2.77e-4"
    assert format_small(0.8) == "0.8"
    assert flops_text(-2_500) == "−2.5 kFLOP"
    assert [seconds_text(value) for value in (0, 0.00004, 0.0042, 0.99949)] == ["0ms", "0.04ms", "4.2ms", "999ms"]
    assert [seconds_text(value) for value in (0.9996, 75, -0.2, -75)] == ["1.0s", "1m 15s", "−200ms", "−1m 15s"]


def test_three_digits_decide_whether_two_figures_are_alike():
    assert alike(3.5200, 3.5203)
    assert not alike(3.52, 3.53)
    assert not alike(3.52, math.nan)

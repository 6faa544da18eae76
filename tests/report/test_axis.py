"""Ticks at round numbers, and an axis for any values."""

import doctest
import math

import pytest

from blocktrain.report import axis as axis_module
from blocktrain.report.axis import axis, padded, tick_values, time_axis


def test_examples_in_docstrings():
    assert doctest.testmod(axis_module).failed == 0


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


def test_a_place_far_outside_is_finite():
    """An edited log has such numbers; drawing them ended in an OverflowError."""
    small = axis("tokens", 0.0, 1e-3)
    assert (small.at(1e308), small.at(-1e308)) == (2.0, -1.0)
    assert math.isfinite(axis("loss", -1.5e308, 1.5e308).at(1.0))

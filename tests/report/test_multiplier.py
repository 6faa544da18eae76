"""The B-F multiplier against curves worked out by hand."""

import doctest
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from blocktrain.report import multiplier
from blocktrain.report.multiplier import multiplier_text, multipliers, tokens_to_reach
from blocktrain.report.run import RunRecord

MakeRun = Callable[..., Path]


def test_examples_in_docstrings():
    assert doctest.testmod(multiplier).failed == 0


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([(0, 4.0), (100, 3.0), (200, 2.0)], 150.0),
        ([(0, 2.0)], 0.0),
        ([(0, 4.0), (100, 2.5)], 100.0),
        ([(0, 4.0), (100, 3.0)], None),
        ([(0, 4.0), (100, math.nan), (200, 2.0)], 150.0),
        ([(0, math.nan), (100, 2.0)], 100.0),
        ([], None),
    ],
)
def test_tokens_to_reach(curve: list[tuple[float, float]], expected: float | None):
    assert tokens_to_reach(2.5, curve) == expected


def test_a_run_learning_at_half_speed_needs_twice_the_tokens(make_run: MakeRun):
    full = RunRecord.load(make_run("full", method="full", steps=300))
    short = RunRecord.load(make_run("short", steps=100, sweeps=1, speed=0.5))
    long = RunRecord.load(make_run("long", steps=100, sweeps=3, speed=0.5))
    (item,) = multipliers([short, full], ["short", "full"])
    assert item.value is None  # it is no longer than the full run
    assert "not reached" in multiplier_text(item, "tokens", "nats per byte")
    (item,) = multipliers([full, long], ["full", "long"])
    assert item.value == pytest.approx(2.0, rel=0.03)
    assert multiplier_text(item, "tokens", "nats per byte").startswith(f"long: B-F multiplier {item.value:.2f}; it")


def test_there_is_none_without_one_run_of_each(make_run: MakeRun):
    run = RunRecord.load(make_run(sweeps=1, steps=5, every=5))
    assert multipliers([run, run], ["a", "b"]) == []

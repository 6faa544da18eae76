"""Learning-rate factors at their ends, in between, and in warm-ups."""

from __future__ import annotations

import math

import pytest

from blocktrain.errors import ConfigError
from blocktrain.optim.learning_rate import LearningRate


def factors(rate: LearningRate, *steps: int, total: int | None = 100) -> list[float]:
    return [rate.factor(step, total=total, visit_step=10**6) for step in steps]


def test_constant_is_one_and_needs_no_end():
    assert factors(LearningRate(), 0, 50, 10**9, total=None) == [1, 1, 1]


def test_linear_falls_to_its_final_value():
    assert factors(LearningRate(shape="linear", final=0.1), 0, 50, 100, 200) == pytest.approx([1, 0.55, 0.1, 0.1])


def test_cosine_falls_slowly_at_its_ends():
    found = factors(LearningRate(shape="cosine", final=0.1), 0, 25, 50, 75, 100)
    assert found == pytest.approx([1, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.1 + 0.45 * (1 - math.sqrt(0.5)), 0.1])


def test_wsd_stays_and_then_falls():
    rate = LearningRate(shape="wsd", final=0.0, decay_share=0.2)
    assert factors(rate, 0, 40, 80, 90, 95, 100) == pytest.approx([1, 1, 1, 0.5, 0.25, 0])
    assert factors(LearningRate(shape="wsd", final=0.0, decay_share=0.5), 50, 75) == [1, 0.5]
    assert factors(LearningRate(shape="wsd", final=0.0, decay_share=0.0), 0, 99) == [1, 1]


@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd"])
def test_no_shape_ever_rises(shape):
    found = factors(LearningRate(shape=shape, final=0.05), *range(101))
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (1.0, pytest.approx(0.05))


def test_warm_ups_rise_from_one_nth_and_multiply():
    rate = LearningRate(warmup_steps=4, visit_warmup_steps=2)
    found = [rate.factor(step, total=None, visit_step=step) for step in range(5)]
    assert found == [0.25 * 0.5, 0.5, 0.75, 1, 1]
    assert rate.factor(100, total=None, visit_step=0) == 0.5  # a later visit warms up alone


def test_a_shape_that_falls_needs_an_end():
    with pytest.raises(ConfigError, match=r"'cosine' needs a run of known length; set stop\.duration or sweeps"):
        LearningRate(shape="cosine").factor(0, total=None, visit_step=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": "cosin"}, "learning-rate shape 'cosin' is unknown; did you mean 'cosine'"),
        ({"final": 1.1}, r"learning-rate final must be in \[0, 1\], not 1.1"),
        ({"decay_share": -0.1}, r"learning-rate decay_share must be in \[0, 1\], not -0.1"),
        ({"warmup_steps": -1}, "learning-rate warmup_steps must not be negative, not -1"),
        ({"visit_warmup_steps": -1}, "learning-rate visit_warmup_steps must not be negative, not -1"),
    ],
)
def test_bad_values_are_named(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        LearningRate(**settings)

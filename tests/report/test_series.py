"""Smoothing and thinning against plain loops, and that no spike is lost."""

import doctest
import math

import numpy as np
import pytest

from blocktrain.report import series
from blocktrain.report.series import evenly, running_mean, thin, window


def test_examples_in_docstrings():
    assert doctest.testmod(series).failed == 0


@pytest.mark.parametrize("size", [1, 3, 7])
def test_running_mean_equals_the_plain_loop(size: int):
    values = np.random.default_rng(0).normal(size=40)
    values[[3, 4, 20]] = np.nan
    half = size // 2
    expected = []
    for middle in range(len(values)):
        near = values[max(0, middle - half) : middle + half + 1]
        expected.append(near[np.isfinite(near)].mean() if np.isfinite(near).any() else np.nan)
    np.testing.assert_allclose(running_mean(values.tolist(), size), expected)


def test_running_mean_of_nothing():
    assert running_mean([], 1) == []
    assert math.isnan(running_mean([math.nan], 1)[0])


@pytest.mark.parametrize("length", [1, 59, 60, 900, 12_345])
def test_windows_are_odd(length: int):
    assert window(length) % 2 == 1


def test_thinning_keeps_ends_spikes_and_gaps():
    values = np.random.default_rng(0).normal(size=20_000)
    values[7_777], values[13_131], values[15_000:15_400] = 50.0, -50.0, np.nan
    keep = thin(values.tolist())
    assert len(keep) <= series.POINTS * 1.2
    assert keep == sorted(set(keep))
    assert {0, 7_777, 13_131, 19_999} <= set(keep)
    assert any(math.isnan(values[index]) for index in keep)


def test_short_series_are_left_alone():
    assert thin([1.0, 2.0, 3.0], 3) == [0, 1, 2]
    assert evenly(3, 5) == [0, 1, 2]
    assert evenly(101, 3) == [0, 50, 100]

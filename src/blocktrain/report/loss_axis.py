"""The range of a loss axis: wide enough for what one reads, not for a spike or for the steep start of training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from blocktrain.report.axis import Axis, padded

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
    cut = len(points) >= FEW and _spread(rest) < _spread(everything) * 0.66
    return padded(label, rest if cut else everything)


def typical_range(values: Sequence[float]) -> list[float]:
    """The range in which nearly all values lie, as (low, high), so that one spike does not flatten the rest; empty
    where no value is finite."""
    finite = [value for value in values if math.isfinite(value)]
    return np.quantile(finite, [0.002, 0.998]).tolist() if finite else []


def _spread(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) - min(finite) if finite else math.inf

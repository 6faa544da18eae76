"""Long series made short enough to draw: the mean over a window, and thinning that keeps every spike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

POINTS = 800  # a plot a thousand pixels wide shows no more


def window(length: int) -> int:
    """An odd window of about a fortieth of the series; 1 (no smoothing) below 60 values."""
    return 1 if length < 60 else length // 40 // 2 * 2 + 1


def running_mean(values: Sequence[float], size: int) -> list[float]:
    """The centred mean over `size` (odd) neighbours, fewer at the ends; values that are not finite are left out.

    >>> running_mean([1.0, 2.0, float("nan"), 4.0], 3)
    [1.5, 1.5, 3.0, 4.0]
    """
    data = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(data)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, data, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    middle = np.arange(len(data))
    first = np.maximum(middle - size // 2, 0)
    last = np.minimum(middle + size // 2 + 1, len(data))
    count = counts[last] - counts[first]
    total = sums[last] - sums[first]
    return np.divide(total, count, out=np.full(len(data), np.nan), where=count > 0).tolist()


def thin(values: Sequence[float], points: int = POINTS) -> list[int]:
    """Indices of about `points` values: both ends, and the least and the greatest value of each bucket.

    A bucket also keeps its first value that is not finite, so that a gap stays a gap.
    """
    length = len(values)
    if length <= points:
        return list(range(length))
    data = np.asarray(values, dtype=np.float64)
    keep = {0, length - 1}
    for bucket in np.array_split(np.arange(length), points // 2):
        finite = np.isfinite(data[bucket])
        if finite.any():
            good = bucket[finite]
            keep.update((int(good[data[good].argmin()]), int(good[data[good].argmax()])))
        if not finite.all():
            keep.add(int(bucket[~finite][0]))
    return sorted(keep)


def evenly(length: int, points: int) -> list[int]:
    """About `points` indices at equal distances, ends included."""
    if length <= points:
        return list(range(length))
    return sorted({round(float(index)) for index in np.linspace(0, length - 1, points)})

"""Dividing a sequence of costs into contiguous parts of nearly equal cost. Plain numbers in, plain ranges out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

from blocktrain.errors import PartitionError


def balanced(costs: Sequence[float], parts: int) -> list[range]:
    """Divide `costs` into contiguous, non-empty ranges. The largest part is as small as possible, because memory is
    set by the largest block; among the divisions with that largest part, the sum of squares is smallest.

    >>> balanced([4, 1, 1, 1, 1, 4], 3)
    [range(0, 1), range(1, 5), range(5, 6)]

    Dynamic programming over (parts, end), O(parts x layers^2). Raises `PartitionError` for fewer costs than parts.
    """
    layers = len(costs)
    if parts < 1:
        raise PartitionError(f"num_blocks must be at least 1, not {parts}")
    if parts > layers:
        raise PartitionError(f"{parts} blocks need at least {parts} layers; the model has {layers}: use fewer blocks")
    total = [0.0, *accumulate(costs)]

    def cost(start: int, end: int) -> float:
        return total[end] - total[start]

    def capped_square(start: int, end: int) -> float:
        part = cost(start, end)
        return part * part if part <= limit * (1 + 1e-12) else float("inf")

    # First the smallest possible largest part, then the most even division within that limit.
    limit, _ = _best(layers, parts, cost, max)
    _, starts = _best(layers, parts, capped_square, operator.add)
    return [range(start, end) for start, end in zip(starts, [*starts[1:], layers], strict=True)]


def balanced_up_to(costs: Sequence[float], limit: float) -> list[range]:
    """Divide `costs` as `balanced` does, into as few contiguous ranges as possible with no part above `limit`. No
    single cost may exceed it.

    >>> balanced_up_to([2, 2, 1, 1, 2], 4)
    [range(0, 2), range(2, 5)]
    """
    parts, filled = 1, 0.0
    for cost in costs:  # filling each part from the front gives the fewest parts
        if filled + cost > limit:
            parts, filled = parts + 1, 0.0
        filled += cost
    return balanced(costs, parts)


def _best(
    layers: int, parts: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The smallest joined cost of dividing `layers` into `parts`, and where each part starts.

    cost: of the part [start, end). join: combines the cost of earlier parts with that of the next one.
    """
    # table[p][e] = (joined cost of the first e layers in p parts, start of the last of them)
    table = [{0: (0.0, 0)}]
    for part in range(1, parts + 1):
        before, row = table[-1], {}
        for end in range(part, layers - (parts - part) + 1):
            row[end] = min((join(before[start][0], cost(start, end)), start) for start in before if start < end)
        table.append(row)
    starts, end = [], layers
    for part in range(parts, 0, -1):
        end = table[part][end][1]
        starts.append(end)
    return table[parts][layers][0], starts[::-1]

"""Cutting a chain into contiguous blocks of nearly equal cost. Plain numbers in, plain numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from blocktrain.errors import PartitionError


def balanced(costs: Sequence[float], parts: int) -> list[range]:
    """Contiguous, non-empty ranges over `costs`: the largest part is as small as it can be, and among those
    divisions the sum of squares is smallest. Memory is set by the largest block, so that comes first.

    >>> balanced([4, 1, 1, 1, 1, 4], 3)
    [range(0, 1), range(1, 5), range(5, 6)]

    Dynamic programming over (parts, end), O(parts x layers^2).
    """
    layers = len(costs)
    if parts < 1:
        raise PartitionError(f"num_blocks must be at least 1, not {parts}")
    if parts > layers:
        raise PartitionError(f"{parts} blocks need at least {parts} layers; the model has {layers}: use fewer blocks")
    total = [0.0, *accumulate(costs)]

    def cost(start: int, end: int) -> float:
        return total[end] - total[start]

    # First the smallest possible largest part, then the most even division that respects it.
    limit = _best(layers, parts, cost, max)[0]
    starts = _best(layers, parts, lambda a, b: _capped_square(cost(a, b), limit), lambda x, y: x + y)[1]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], layers], strict=True)]


def balanced_up_to(costs: Sequence[float], limit: float) -> list[range]:
    """As few contiguous ranges as keep each part within `limit`, divided as `balanced` does; no cost may exceed it.

    >>> balanced_up_to([2, 2, 1, 1, 2], 4)
    [range(0, 2), range(2, 5)]
    """
    parts, filled = 1, 0.0
    for cost in costs:  # taking as many as fit, from the front, gives the fewest
        if filled + cost > limit:
            parts, filled = parts + 1, 0.0
        filled += cost
    return balanced(costs, parts)


def _capped_square(cost: float, limit: float) -> float:
    return cost * cost if cost <= limit * (1 + 1e-12) else float("inf")


def _best(layers: int, parts: int, cost, join) -> tuple[float, list[int]]:
    """The smallest joined cost of dividing `layers` into `parts`, and where each part starts."""
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

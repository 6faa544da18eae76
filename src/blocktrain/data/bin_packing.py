"""Packing sequences of different lengths into rows of equal length: best fit, the longest first.

capacity 8      | 5 5 5 5 5 3 3 3 | 4 4 4 4 2 2 . . |
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def best_fit(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """The indices of `lengths` row by row; the lengths of a row sum to at most `capacity`, its indices ascend.

    Each sequence goes to the fullest row that still has room for it (Johnson 1973: at most 11/9 of the fewest possible
    rows, plus one). Deterministic.

    >>> best_fit([3, 5, 2, 4], 8)
    [[0, 1], [2, 3]]
    """
    lengths = np.asarray(lengths)
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # free tokens -> rows that have them
    rooms: list[int] = []  # the sorted keys of `open_rows`
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[place]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[place]
        rows[row].append(index)
        left = room - length
        if left not in open_rows:
            open_rows[left] = []
            insort(rooms, left)
        open_rows[left].append(row)
    return [sorted(row) for row in rows]

"""The order in which rows are seen: a pure function of the seed and an integer position, all a checkpoint needs.

position     0 ........ n-1 | n ....... 2n-1 | 2n ...
rows         permutation 0  | permutation 1  | permutation 2 ...     (n rows, each once an epoch)
one step     [ rank 0 | rank 1 | ... ]   `rank_share` of the step's rows
"""

from __future__ import annotations

import numpy as np

from blocktrain.errors import ConfigError, DataError
from blocktrain.runtime import permutation


class ShuffledRows:
    """An endless stream of row indices, one seeded permutation after another, with access to any place in it."""

    def __init__(self, num_rows: int, *, seed: int):
        """An order of rows [0, num_rows); raises `DataError` if there are none."""
        if num_rows < 1:
            raise DataError("there are no rows to put in order")
        self.num_rows = num_rows
        self.seed = seed
        self._permutations: dict[int, np.ndarray] = {}  # of two epochs at most: 16 bytes a row

    def epoch(self, position: int) -> int:
        """How often every row has been seen before `position`."""
        return position // self.num_rows

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The rows at positions [start, stop), int64 (stop - start,)."""
        if not 0 <= start <= stop:
            raise ValueError(f"positions [{start}, {stop}) are not a range from 0 on")
        pieces = [np.empty(0, np.int64)]
        while start < stop:
            epoch, place = divmod(start, self.num_rows)
            piece = self._permutation(epoch)[place : place + stop - start]
            pieces.append(piece)
            start += len(piece)
        return np.concatenate(pieces)

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            kept = {other: rows for other, rows in self._permutations.items() if other == epoch - 1}
            self._permutations = {**kept, epoch: permutation(self.num_rows, self.seed, epoch)}
        return self._permutations[epoch]


def rank_share(indices: np.ndarray, *, rank: int, world_size: int) -> np.ndarray:
    """The part of a step's rows that `rank` of `world_size` works on: even, contiguous, in rank order.

    >>> rank_share(np.arange(6), rank=1, world_size=3)
    array([2, 3])
    """
    count, rest = divmod(len(indices), world_size)
    if rest:
        raise ConfigError(
            f"{len(indices)} rows a step cannot be shared evenly by {world_size} ranks; make it a multiple of "
            f"{world_size}, for example {(count + 1) * world_size}"
        )
    return indices[rank * count : (rank + 1) * count]

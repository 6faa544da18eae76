"""The order in which rows are seen: a pure function of the seed and of an integer position, so a checkpoint stores only
the position.

position     0 ........ n-1 | n ....... 2n-1 | 2n ...
rows         permutation 0  | permutation 1  | permutation 2 ...     (n rows, each once per epoch)
one step     [ rank 0 | rank 1 | ... ]   `rank_share` of the rows of the step
"""

from __future__ import annotations

import numpy as np

from blocktrain.errors import ConfigError, DataError
from blocktrain.runtime import permutation


class ShuffledRows:
    """An endless stream of row indices, one seeded permutation after another, with random access."""

    def __init__(self, num_rows: int, *, seed: int):
        """Shuffle rows [0, num_rows); raises `DataError` if there are none."""
        if num_rows < 1:
            raise DataError("there are no rows to shuffle")
        self.num_rows = num_rows
        self.seed = seed
        self._permutations: dict[int, np.ndarray] = {}  # at most two epochs: 16 bytes per row

    def epoch(self, position: int) -> int:
        """How many times every row has been seen before `position`."""
        return position // self.num_rows

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The rows at positions [start, stop), int64 (stop - start,)."""
        if not 0 <= start <= stop:
            raise ValueError(f"[{start}, {stop}) is not a range of positions")
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
    """The part of a step's rows that `rank` of `world_size` works on: equal, contiguous parts in the order of ranks.

    Raises `ConfigError` if the rows cannot be divided equally.

    >>> rank_share(np.arange(6), rank=1, world_size=3)
    array([2, 3])
    """
    count, rest = divmod(len(indices), world_size)
    if rest:
        raise ConfigError(
            f"{len(indices)} rows per step cannot be divided equally among {world_size} ranks; make it a multiple of "
            f"{world_size}, for example {(count + 1) * world_size}"
        )
    return indices[rank * count : (rank + 1) * count]

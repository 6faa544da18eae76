"""A prefix cache for processes that can only run layers together, because each has a part of every weight (FSDP2).

Each stores and reads its own rows, as ever. But whether a micro-batch needs a pass, and from which boundary, they find
out together; where one of them has to compute, all do, each its own rows:

    all at the visit's level          read, nothing runs
    all at the same level below it    one pass from there
    anything else                     one pass from the inputs
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from blocktrain.cache.encoding import Fields
from blocktrain.cache.prefix_cache import Batch, BoundaryStore, PrefixCache
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.errors import StorageError

BROKEN = -1  # in place of a level


class CollectivePrefixCache(PrefixCache):
    """As `PrefixCache`; every process must make the same calls, with as many rows.

    gather: hands every process the number that each of them gives, in order.
    """

    def __init__(self, cut: BoundaryRunner, *, gather: Callable[[int], list[int]], **settings: Any):
        super().__init__(cut, **settings)
        self._gather = gather
        self._failed: StorageError | None = None

    def open(self, level: int, **settings: Any) -> None:
        """As `PrefixCache.open`, with room on all processes or `StorageError` on all."""
        self._failed = None
        try:
            super().open(level, **settings)
        except StorageError as error:
            self._failed = error
        self._agreed(0)

    def fetch(self, slots: np.ndarray, batch: Batch) -> Tensor:
        """As `PrefixCache.fetch`; raises `StorageError` on all processes where it would on one."""
        hidden, stored = self._taken(slots, batch)
        self.statistics.asked += len(slots)
        self.statistics.hits += len(slots) if stored else 0
        return hidden

    def fill(self, slots: np.ndarray, batch: Batch) -> Tensor:
        """Likewise."""
        return self._taken(slots, batch)[0]

    def missing(self, slots: np.ndarray) -> np.ndarray:
        """All of them: another process may lack its own."""
        return slots

    def _taken(self, slots: np.ndarray, batch: Batch) -> tuple[Tensor, bool]:
        """Hidden states at the visit's level, and whether they were stored there."""
        start = time.perf_counter()
        mine, hidden = self._read_here(slots)
        level = self._agreed(mine)
        if hidden is not None and level == self.level:
            self.statistics.wait_seconds += time.perf_counter() - start
            return hidden, True
        self._settle()  # what was read ahead is written over now
        hidden = self._compute(level, hidden if level else None, slots, batch)
        self.statistics.fill_seconds += time.perf_counter() - start
        return hidden, False

    def _agreed(self, mine: int) -> int:
        """The level from which all go on; the inputs (0) unless they have the same."""
        told = self._gather(mine if self._failed is None else BROKEN)
        if BROKEN in told:
            raise self._failed or StorageError("another process cannot store or read its rows; its output says why")
        return mine if len(set(told)) == 1 else 0

    def _read_here(self, slots: np.ndarray) -> tuple[int, Tensor | None]:
        """The level that all of `slots` have, and what is stored there; 0 where there is none."""
        [(_, (level, kept)), *others] = self._sources(slots, np.ones(len(slots), bool))
        if others or kept is None:
            return 0, None
        try:
            return level, self._awaited(slots) if level == self.level else self._read(kept, slots)
        except StorageError as error:
            self._failed = error
            return 0, None

    def _put(self, kept: BoundaryStore, slots: np.ndarray, level: int, fields: Fields) -> None:
        """What cannot be stored here is told at the next agreement: the pass that made it was one of all."""
        try:
            super()._put(kept, slots, level, fields)
        except StorageError as error:
            self._failed = error

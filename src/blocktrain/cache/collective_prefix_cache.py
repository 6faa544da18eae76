"""The prefix cache under FSDP2, where ranks must run layers together because each has a shard of every weight.

Each rank stores and reads its own rows, as without sharding. But the ranks find out together whether a micro-batch
needs a forward pass, and from which boundary; where one of them has to compute, all of them do, each its own rows:

    all rows stored at the visit's boundary, on every rank          read, nothing runs
    all rows stored at one boundary below it, on every rank         one pass from there
    anything else                                                   one pass from the inputs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor

from blocktrain.cache.encoding import Encoding, Fields
from blocktrain.cache.prefix_cache import Batch, BoundaryStore, MakeStore, PrefixCache
from blocktrain.cache.slot_ledger import Fingerprints, Key
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.errors import StorageError

FAILED = -1  # what a rank whose store failed reports in place of a boundary


class CollectivePrefixCache(PrefixCache):
    """A `PrefixCache` on every rank. Collective: every rank must make the same calls, with as many rows.

    all_gather: returns the numbers that the ranks pass, in rank order.
    """

    def __init__(
        self,
        runner: BoundaryRunner,
        *,
        all_gather: Callable[[int], list[int]],
        num_slots: int,
        encoding: Encoding,
        make_store: MakeStore,
        boundaries: Sequence[int] | None = None,
        block_boundaries: Iterable[int] = (),
    ):
        super().__init__(
            runner,
            num_slots=num_slots,
            encoding=encoding,
            make_store=make_store,
            boundaries=boundaries,
            block_boundaries=block_boundaries,
        )
        self._all_gather = all_gather
        self._error: StorageError | None = None  # of this rank, not yet reported to the others

    def open(self, boundary: int, *, key: Key, sample: Batch, fingerprints: Fingerprints | None = None) -> None:
        """Like `PrefixCache.open`. Either every rank gets its space, or `StorageError` is raised on every rank."""
        self._error = None
        try:
            super().open(boundary, key=key, sample=sample, fingerprints=fingerprints)
        except StorageError as error:
            self._error = error
        self._agree(0)

    def fetch(self, slots: np.ndarray, batch: Batch) -> Tensor:
        """Like `PrefixCache.fetch`. A `StorageError` of one rank is raised on every rank."""
        hidden, was_stored = self._read_or_compute(slots, batch)
        self.statistics.requested += len(slots)
        self.statistics.hits += len(slots) if was_stored else 0
        return hidden

    def fill(self, slots: np.ndarray, batch: Batch) -> Tensor:
        """Like `PrefixCache.fill`. A `StorageError` of one rank is raised on every rank."""
        return self._read_or_compute(slots, batch)[0]

    def missing(self, slots: np.ndarray) -> np.ndarray:
        """All of `slots`: another rank may have to compute its own, and then this one computes too."""
        return slots

    def _read_or_compute(self, slots: np.ndarray, batch: Batch) -> tuple[Tensor, bool]:
        """Hidden states at the visit's boundary, and whether they were stored there on every rank."""
        start = time.perf_counter()
        local_source, hidden = self._read_local(slots)
        source = self._agree(local_source)
        if hidden is not None and source == self.boundary:
            self.statistics.wait_seconds += time.perf_counter() - start
            return hidden, True
        self._discard_prefetched()  # the pass will overwrite these rows
        hidden = self._compute(source, hidden if source else None, slots, batch)
        self.statistics.fill_seconds += time.perf_counter() - start
        return hidden, False

    def _agree(self, boundary: int) -> int:
        """The boundary from which every rank computes: this one if it is equal on every rank, else the inputs (0)."""
        reported = self._all_gather(boundary if self._error is None else FAILED)
        if FAILED in reported:
            raise self._error or StorageError(
                "another process cannot store or read its rows; see its output for the reason"
            )
        return boundary if len(set(reported)) == 1 else 0

    def _read_local(self, slots: np.ndarray) -> tuple[int, Tensor | None]:
        """The one boundary at which all of `slots` are stored on this rank, and their states; 0 where there is none."""
        [(_, source, stored), *others] = self._group_by_source(slots, np.ones(len(slots), bool))
        if others or stored is None:
            return 0, None
        try:
            return source, self._read_or_await(slots) if source == self.boundary else self._read(stored, slots)
        except StorageError as error:
            self._error = error
            return 0, None

    def _write(self, stored: BoundaryStore, slots: np.ndarray, boundary: int, fields: Fields) -> None:
        """A failure to write is reported at the next agreement: the pass that made these rows was collective."""
        try:
            super()._write(stored, slots, boundary, fields)
        except StorageError as error:
            self._error = error

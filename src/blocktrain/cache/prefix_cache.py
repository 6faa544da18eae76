"""The prefix cache: hidden states below the active block, computed once for each row and read by later steps.

The prefix is the frozen layers below the active block (not a prompt, as in inference servers); a visit is the time for
which a block is active; a row is an example of the training data.

A row is computed from the nearest boundary that is stored. What is stored depends on the order of the visits:

ascending    one store; a visit finds the rows at the boundary of the block before, and advances them in place
             through that block alone: a sweep costs one forward pass over the subset in all

    visit to block 1    inputs                --block 0--> boundary of block 1
    visit to block 2    boundary of block 1   --block 1--> boundary of block 2

descending   one store for each boundary; the first visit's forward pass fills them all, and none goes stale
             while the blocks above it are trained

Boundary i is the one below layer i, so boundary 0 is the model's inputs.

A row that is stored with a loss is rounded at each block's boundary on its way up, whether it is stored there or not.
So a row computed again after a restart is the one that was advanced from visit to visit before it, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blocktrain.cache.encoding import Encoding, Fields
from blocktrain.cache.slot_ledger import Fingerprints, Key, Ledger
from blocktrain.cache.store import RowLayout, Store, layout_of
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.errors import StorageError
from blocktrain.runtime import SideStream

MakeStore = Callable[[str, int, RowLayout], Store]  # (name, slots, layout) -> store
Batch = Mapping[str, Any]  # the model's inputs; values that are not tensors belong to all rows


@dataclass(kw_only=True)
class CacheStatistics:
    """Counts and times of the cache in one visit."""

    requested: int = 0  # rows that steps asked for
    hits: int = 0  # requested rows that were stored at the visit's boundary
    computed: int = 0  # rows run through some layers, for a step or ahead of it
    layers_run: dict[tuple[int, int], int] = field(default_factory=dict)  # (from boundary, to boundary) -> rows
    stale: int = 0  # slots dropped because the layers below them had changed
    damaged: int = 0  # slots dropped because their checksum differed
    bytes_stored: int = 0  # allocated in the stores
    fill_seconds: float = 0.0  # computing and storing
    wait_seconds: float = 0.0  # steps waiting for stored rows
    encoding_error: float = 0.0  # relative, of the first rows stored


@dataclass(eq=False)
class BoundaryStore:
    """A store and the ledger of what is in it."""

    layout: RowLayout
    store: Store
    ledger: Ledger

    def close(self, *, keep_files: bool = False) -> None:
        """Close both; `keep_files` leaves their files in place."""
        self.store.close(keep_files=keep_files)
        self.ledger.close(keep_files=keep_files)


class PrefixCache:
    """Hidden states of `num_slots` rows at the boundary below the active block.

    make_store: makes a store from its name, the number of slots and the layout of a slot.
    boundaries: the boundaries to store as a forward pass crosses them (descending order). With None there is one store,
        whose rows are advanced from boundary to boundary (any other order).
    block_boundaries: all boundaries below blocks, where rows that are stored with a loss are rounded.
    """

    def __init__(
        self,
        runner: BoundaryRunner,
        *,
        num_slots: int,
        encoding: Encoding,
        make_store: MakeStore,
        boundaries: Sequence[int] | None = None,
        block_boundaries: Iterable[int] = (),
    ):
        self.runner = runner
        self.encoding = encoding
        self.statistics = CacheStatistics()
        self.boundary = 0  # of the current visit
        self._num_slots = num_slots
        self._make_store = make_store
        self._boundaries = None if boundaries is None else sorted(boundaries)
        self._rounded_at = [] if encoding.kind == "compute" else sorted(set(block_boundaries))
        self._key: Key = {}
        self._dtype = torch.float32
        self._stores: dict[str, BoundaryStore] = {}
        self._current = ""  # the name of the store in use, where one store serves all boundaries
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="blocktrain-prefetch")
        self._prefetched: tuple[np.ndarray, Future[Fields]] | None = None  # slots, and their rows being read
        self._side = SideStream(next(runner.chain.model.parameters()).device)

    # -- visits ---------------------------------------------------------------------------------------------------

    def open(self, boundary: int, *, key: Key, sample: Batch, fingerprints: Fingerprints | None = None) -> None:
        """Start a visit whose active block begins at `boundary` >= 1.

        key: what the rows in the slots are. Another key than before empties the cache.
        sample: a batch of at least one row. It is run to check the boundary (raises `BoundaryError`) and to learn the
            rows' shape.
        fingerprints: of the weights as they are, if the caller has them already.
        """
        self._discard_prefetched()
        if not self.matches(key):
            self.clear()
            self._key = dict(key)
        self.statistics = CacheStatistics()
        self.boundary = boundary
        self.runner.check(sample, boundary)
        targets = [boundary] if self._boundaries is None else [at for at in self._boundaries if at <= boundary]
        states = self.runner.states(sample, targets)
        self._dtype = states[boundary].dtype
        for target in targets:
            self._ensure_store(target, layout_of(self.encoding.encode(states[target])))
        self._drop_unusable(boundary, fingerprints or Fingerprints(self.runner.chain))
        self.statistics.bytes_stored = self.nbytes

    def matches(self, key: Key) -> bool:
        """Whether the slots are those of `key`."""
        return key == self._key

    def rows_by_source(self, boundary: int, *, key: Key, fingerprints: Fingerprints | None = None) -> dict[int, int]:
        """How many slots a visit at `boundary` could fill from each stored boundary (0: from the inputs).

        fingerprints: see `open`.
        """
        ledgers = [stored.ledger for stored in self._stores.values()] if self.matches(key) else []
        below = {int(at) for ledger in ledgers for at in np.unique(ledger.boundaries) if 0 < at <= boundary}
        current = (fingerprints or Fingerprints(self.runner.chain)).at(below)
        best = np.zeros(self._num_slots, np.int32)
        for ledger in ledgers:
            fresh = [at for at in below if ledger.made_from.get(at) == current.get(at)]
            np.maximum(best, np.where(np.isin(ledger.boundaries, fresh), ledger.boundaries, 0), out=best)
        return {int(at): int((best == at).sum()) for at in np.unique(best)}

    @property
    def nbytes(self) -> int:
        """Bytes allocated in all stores."""
        return sum(stored.store.nbytes for stored in self._stores.values())

    def clear(self, *, keep_files: bool = False) -> None:
        """Free all memory, and delete all files unless `keep_files`."""
        self._discard_prefetched()
        for stored in self._stores.values():
            stored.close(keep_files=keep_files)
        self._stores = {}

    def close(self, *, keep_files: bool = False) -> None:
        """Close the cache for good; `keep_files` where the run is only interrupted."""
        self._reader.shutdown(wait=True)
        self.clear(keep_files=keep_files)

    # -- rows -----------------------------------------------------------------------------------------------------

    def fetch(self, slots: np.ndarray, batch: Batch) -> Tensor:
        """Hidden states at the visit's boundary for `slots`, (B, ...), on the model's device; rows that are not stored
        there are computed from `batch` (the model's inputs for these slots) and stored."""
        hits = int(self._are_stored(slots).sum())
        if hits < len(slots):
            hidden = self.fill(slots, batch)
        else:
            start = time.perf_counter()
            hidden = self._read_or_await(slots)
            self.statistics.wait_seconds += time.perf_counter() - start
        self.statistics.requested += len(slots)  # not before: on a full disk the caller runs the whole model instead
        self.statistics.hits += hits
        return hidden

    def fill(self, slots: np.ndarray, batch: Batch) -> Tensor:
        """Like `fetch`, but not counted as a request: computes and stores those of `slots` that are missing."""
        start = time.perf_counter()
        here = self._are_stored(slots)
        parts = [(np.flatnonzero(here), self._read(self._store_at(self.boundary), slots[here]))] if here.any() else []
        for rows, source, below in self._group_by_source(slots, ~here):
            # A row never runs alone if the others of its batch are stored: some kernels round it differently then.
            run = np.repeat(rows, 2) if len(rows) == 1 < len(slots) else rows
            hidden = None if below is None else self._read(below, slots[run])
            computed = self._compute(source, hidden, slots[run], _rows_of(batch, run, len(slots)))
            parts.append((rows, computed[: len(rows)]))
        self.statistics.fill_seconds += time.perf_counter() - start
        if len(parts) == 1:
            return parts[0][1]
        order = np.argsort(np.concatenate([rows for rows, _ in parts]))
        return torch.cat([hidden for _, hidden in parts])[torch.from_numpy(order).to(self._side.device)]

    def prefetch(self, slots: np.ndarray) -> None:
        """Start reading `slots`, which the next `fetch` will ask for, in the background if all of them are stored."""
        if self._are_stored(slots).all():
            self._prefetched = (slots, self._reader.submit(self._read_fields, self._store_at(self.boundary), slots))

    def missing(self, slots: np.ndarray) -> np.ndarray:
        """Those of `slots` that a fetch would have to compute."""
        return slots[~self._are_stored(slots)]

    def _are_stored(self, slots: np.ndarray) -> np.ndarray:
        """Whether each of `slots` is stored at the visit's boundary, bool."""
        return self._store_at(self.boundary).ledger.boundaries[slots] == self.boundary

    # -- reading --------------------------------------------------------------------------------------------------

    def _read_or_await(self, slots: np.ndarray) -> Tensor:
        """The hidden states of `slots`, which are all stored, from the prefetch if it was for them."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and np.array_equal(prefetched[0], slots):
            return self._decode(prefetched[1].result())
        return self._read(self._store_at(self.boundary), slots)

    def _discard_prefetched(self) -> None:
        """Wait for a read in the background whose rows will not be asked for."""
        if self._prefetched is not None:
            self._prefetched[1].exception()
            self._side.join()
            self._prefetched = None

    def _read(self, stored: BoundaryStore, slots: np.ndarray) -> Tensor:
        return self._decode(self._read_fields(stored, slots))

    def _read_fields(self, stored: BoundaryStore, slots: np.ndarray) -> Fields:
        """Read rows and start their copy to the device, on a stream of its own; a prefetch calls this in its thread."""
        return {name: self._side.to_device(rows) for name, rows in stored.store.read(slots).items()}

    def _decode(self, fields: Fields) -> Tensor:
        self._side.join()
        return self.encoding.decode(fields, self._dtype)

    # -- computing ------------------------------------------------------------------------------------------------

    def _group_by_source(
        self, slots: np.ndarray, wanted: np.ndarray
    ) -> list[tuple[np.ndarray, int, BoundaryStore | None]]:
        """Those of `slots` that are `wanted` (bool), grouped by where they can be computed from.

        Returns positions in `slots`, the highest stored boundary up to the visit's (0: the inputs), and its store.
        """
        best = np.zeros(len(slots), np.int32)
        names = np.full(len(slots), "", object)
        for name, stored in self._stores.items():
            boundaries = stored.ledger.boundaries[slots]
            better = wanted & (boundaries > best) & (boundaries <= self.boundary)
            best[better], names[better] = boundaries[better], name
        groups = sorted({(int(best[row]), str(names[row])) for row in np.flatnonzero(wanted)})
        return [
            (np.flatnonzero(wanted & (best == source) & (names == name)), source, self._stores.get(name))
            for source, name in groups
        ]

    def _compute(self, source: int, hidden: Tensor | None, slots: np.ndarray, batch: Batch) -> Tensor:
        """Run `batch` from `hidden` at the boundary `source` (0: from its inputs) up to the visit's boundary, and store
        the hidden states at the boundaries that are to be stored."""
        kept = [self.boundary] if self._boundaries is None else self._boundaries
        targets = [at for at in kept if source < at <= self.boundary]
        passes = [[at] for at in self._rounded_at if source < at <= self.boundary] or [targets]
        below, states = source, dict[int, Tensor]()
        for stops in passes:
            states = self.runner.states(batch, stops, start=below, hidden=hidden)
            for below in stops:
                fields = self.encoding.encode(states[below])
                if below in targets:
                    self._write(self._store_at(below), slots, below, fields)
                # Go on from, and train on, what later reads will return, the first time too.
                hidden = self.encoding.decode(fields, self._dtype)
        assert hidden is not None
        if not self.statistics.computed:
            self.statistics.encoding_error = self.encoding.error(states[self.boundary])
        self.statistics.computed += len(np.unique(slots))
        run = (source, self.boundary)
        self.statistics.layers_run[run] = self.statistics.layers_run.get(run, 0) + len(slots)
        return hidden

    def _write(self, stored: BoundaryStore, slots: np.ndarray, boundary: int, fields: Fields) -> None:
        stored.ledger.unmark(slots)
        stored.store.write(slots, fields)
        stored.ledger.mark(slots, boundary, fields)

    # -- stores ---------------------------------------------------------------------------------------------------

    def _store_at(self, boundary: int) -> BoundaryStore:
        return self._stores[self._store_name(boundary)]

    def _store_name(self, boundary: int) -> str:
        """The store of `boundary`'s rows: one for each boundary (descending order), else one for each row layout."""
        return f"boundary-{boundary}" if self._boundaries is not None else self._current

    def _ensure_store(self, boundary: int, layout: RowLayout) -> None:
        """Make the store for rows of `boundary` unless there is one."""
        if self._boundaries is None:
            alike = [name for name, stored in self._stores.items() if stored.layout == layout]
            self._current = alike[0] if alike else "rows-" + "x".join(str(size) for size in layout["data"].shape)
        name = self._store_name(boundary)
        if name in self._stores:
            return
        described = {name: [list(item.shape), str(item.dtype)] for name, item in layout.items()}
        key = {**self._key, "encoding": self.encoding.kind, "layout": described, "torch": torch.__version__}
        store = self._make_store(name, self._num_slots, layout)
        try:
            ledger = Ledger(self._num_slots, key=key, folder=store.folder)
        except StorageError:
            store.close()
            raise
        self._stores[name] = BoundaryStore(layout, store, ledger)
        if store.folder is not None:
            self.statistics.damaged += ledger.drop_damaged(store)

    def _drop_unusable(self, boundary: int, fingerprints: Fingerprints) -> None:
        """Drop stale rows; close the stores that have no row from which a visit at `boundary` could compute."""
        stored_at = {int(at) for stored in self._stores.values() for at in np.unique(stored.ledger.boundaries) if at}
        current = fingerprints.at(stored_at | {boundary} | set(self._boundaries or ()))
        for stored in self._stores.values():
            self.statistics.stale += stored.ledger.drop_stale(current)
        if self._boundaries is not None:
            return
        best = np.zeros(self._num_slots, np.int32)
        for stored in self._stores.values():
            stored.ledger.unmark(np.flatnonzero(stored.ledger.boundaries > boundary))
            np.maximum(best, stored.ledger.boundaries, out=best)
        for name, stored in list(self._stores.items()):
            behind = stored.ledger.boundaries < best  # these rows have advanced to a store of another layout
            stored.ledger.unmark(np.flatnonzero(behind))
            if name != self._store_name(boundary) and not stored.ledger.boundaries.any():
                self._stores.pop(name).close()


def _rows_of(batch: Batch, rows: np.ndarray, count: int) -> Batch:
    """The batch's `rows`, or the batch itself where these are all of its `count` rows."""
    if np.array_equal(rows, np.arange(count)):
        return batch
    return {
        name: value[torch.from_numpy(rows).to(value.device)] if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }

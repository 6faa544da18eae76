"""The prefix cache: hidden states of a subset's rows, each computed once from the nearest thing that is stored.

ascending    one kept; a visit finds the rows at the boundary of the block before and takes them from there
             through that block alone, in place: a sweep costs one forward pass over the subset in all

    visit to block 1    inputs  --block 0--> level 1
    visit to block 2    level 1 --block 1--> level 2

descending   one kept a boundary; the first visit's forward pass fills them all, and none goes stale
             while the blocks above it are trained
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blocktrain.cache.encoding import Encoding, Fields
from blocktrain.cache.ledger import Fingerprints, Key, Ledger
from blocktrain.cache.store import RowLayout, Store, layout_of
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.errors import StorageError
from blocktrain.runtime import SideStream

MakeStore = Callable[[str, int, RowLayout], Store]  # (name, slots, layout) -> store
Batch = Mapping[str, Any]


@dataclass(kw_only=True)
class Statistics:
    """What the cache did in a visit."""

    asked: int = 0  # rows that steps asked for
    hits: int = 0  # of these, found at the level asked for
    computed: int = 0  # rows run through some layers, for a step or ahead of it
    layers_run: dict[tuple[int, int], int] = field(default_factory=dict)  # (from level, to level) -> rows
    stale: int = 0  # slots refused because the layers below them had changed
    damaged: int = 0  # slots refused for their checksum
    bytes_stored: int = 0  # room claimed
    fill_seconds: float = 0.0  # computing and storing
    wait_seconds: float = 0.0  # a step waiting for stored rows
    encoding_error: float = 0.0  # relative, of the first rows stored


@dataclass(eq=False)
class BoundaryStore:
    """A store and the ledger of what is in it."""

    layout: RowLayout
    store: Store
    ledger: Ledger

    def close(self, *, keep_files: bool = False) -> None:
        """Both of them."""
        self.store.close(keep_files=keep_files)
        self.ledger.close(keep_files=keep_files)


class PrefixCache:
    """Hidden states of `num_slots` rows at the boundary of the active block.

    make_store: makes the room for a kept. levels: boundaries to keep as they are passed (descending order); None
    keeps one kept and moves it up (any other order).
    """

    def __init__(
        self,
        cut: BoundaryRunner,
        *,
        num_slots: int,
        encoding: Encoding,
        make_store: MakeStore,
        levels: Sequence[int] | None = None,
    ):
        self.cut = cut
        self.encoding = encoding
        self.statistics = Statistics()
        self.level = 0
        self._num_slots = num_slots
        self._make_store = make_store
        self._levels = None if levels is None else sorted(levels)
        self._key: Key = {}
        self._dtype = torch.float32
        self._stores: dict[str, BoundaryStore] = {}
        self._current = ""  # the kept in use where there is one for all levels
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="blocktrain-prefetch")
        self._coming: tuple[np.ndarray, Future[Fields]] | None = None
        self._side = SideStream(next(cut.chain.model.parameters()).device)

    # -- visits ---------------------------------------------------------------------------------------------------

    def open(self, level: int, *, key: Key, sample: Batch, now: Fingerprints | None = None) -> None:
        """Start a visit whose active block begins at `level` >= 1.

        key: what the rows in the slots are (another key empties the cache).
        sample: a batch of at least one row. It is run to check the boundary (`BoundaryError`) and to learn the rows'
            shape.
        now: fingerprints of the weights as they are, if `held` has computed them already.
        """
        self._settle()
        if key != self._key:
            self.clear()
            self._key = dict(key)
        self.statistics = Statistics()
        self.level = level
        self.cut.check(sample, level)
        targets = [level] if self._levels is None else [at for at in self._levels if at <= level]
        states = self.cut.states(sample, targets)
        self._dtype = states[level].dtype
        for at in targets:
            self._claim(at, layout_of(self.encoding.encode(states[at])))
        self._drop_useless(level, now or Fingerprints(self.cut.chain))
        self.statistics.bytes_stored = self.nbytes

    def holds(self, key: Key) -> bool:
        """Whether the slots are those of `key`."""
        return key == self._key

    def held(self, level: int, *, key: Key, now: Fingerprints | None = None) -> dict[int, int]:
        """How many slots could be filled from which level (0: from the inputs) in a visit at `level`; now: see
        `open`."""
        ledgers = [kept.ledger for kept in self._stores.values()] if key == self._key else []
        below = {int(at) for ledger in ledgers for at in np.unique(ledger.levels) if 0 < at <= level}
        made_now = (now or Fingerprints(self.cut.chain)).at(below)
        best = np.zeros(self._num_slots, np.int32)
        for ledger in ledgers:
            fresh = [at for at in below if ledger.made_from.get(at) == made_now.get(at)]
            np.maximum(best, np.where(np.isin(ledger.levels, fresh), ledger.levels, 0), out=best)
        return {int(at): int((best == at).sum()) for at in np.unique(best)}

    @property
    def nbytes(self) -> int:
        """Room claimed."""
        return sum(kept.store.nbytes for kept in self._stores.values())

    def clear(self) -> None:
        """Give all room back and delete all files."""
        self._close_stores(keep_files=False)

    def close(self, *, keep_files: bool = False) -> None:
        """The cache is needed no more; `keep_files` where the run is only interrupted."""
        self._reader.shutdown(wait=True)
        self._close_stores(keep_files=keep_files)

    # -- rows -----------------------------------------------------------------------------------------------------

    def fetch(self, slots: np.ndarray, batch: Batch) -> Tensor:
        """Hidden states at the visit's level for `slots`, (B, ...), on the model's device; rows that are not stored
        there are computed from `batch` (the model's inputs for these slots) and stored."""
        here = int((self._store_of(self.level).ledger.levels[slots] == self.level).sum())
        if here < len(slots):
            hidden = self.fill(slots, batch)
        else:
            start = time.perf_counter()
            hidden = self._awaited(slots)
            self.statistics.wait_seconds += time.perf_counter() - start
        self.statistics.asked += len(slots)  # only now: a full disk sends the caller back to the whole model
        self.statistics.hits += here
        return hidden

    def fill(self, slots: np.ndarray, batch: Batch) -> Tensor:
        """The same without a step that asks: compute and store what is missing of `slots`."""
        start = time.perf_counter()
        kept = self._store_of(self.level)
        here = kept.ledger.levels[slots] == self.level
        parts = [(np.flatnonzero(here), self._read(kept, slots[here]))] if here.any() else []
        for at, (level, kept) in self._sources(slots, ~here):
            hidden = None if kept is None else self._read(kept, slots[at])
            parts.append((at, self._compute(level, hidden, slots[at], _rows_of(batch, at, len(slots)))))
        self.statistics.fill_seconds += time.perf_counter() - start
        if len(parts) == 1:
            return parts[0][1]
        order = np.argsort(np.concatenate([at for at, _ in parts]))
        return torch.cat([hidden for _, hidden in parts])[torch.from_numpy(order).to(self._side.device)]

    def prefetch(self, slots: np.ndarray) -> None:
        """Start reading `slots` in the background if they are all stored: the next `fetch` will ask for them."""
        kept = self._store_of(self.level)
        if (kept.ledger.levels[slots] == self.level).all():
            self._coming = (slots, self._reader.submit(self._fetched, kept, slots))

    def missing(self, slots: np.ndarray) -> np.ndarray:
        """Those of `slots` that a fetch would have to compute."""
        return slots[self._store_of(self.level).ledger.levels[slots] != self.level]

    # -- parts ----------------------------------------------------------------------------------------------------

    def _close_stores(self, *, keep_files: bool) -> None:
        self._settle()
        for kept in self._stores.values():
            kept.close(keep_files=keep_files)
        self._stores = {}

    def _awaited(self, slots: np.ndarray) -> Tensor:
        coming, self._coming = self._coming, None
        if coming is not None and np.array_equal(coming[0], slots):
            return self._decoded(coming[1].result())
        return self._read(self._store_of(self.level), slots)

    def _settle(self) -> None:
        """Wait for a read in the background that nobody will ask for."""
        if self._coming is not None:
            self._coming[1].exception()
            self._side.join()
            self._coming = None

    def _read(self, kept: BoundaryStore, slots: np.ndarray) -> Tensor:
        return self._decoded(self._fetched(kept, slots))

    def _fetched(self, kept: BoundaryStore, slots: np.ndarray) -> Fields:
        """On their way to the device, beside what it computes; in the background, in the reader's thread."""
        return {name: self._side.to_device(rows) for name, rows in kept.store.read(slots).items()}

    def _decoded(self, fields: Fields) -> Tensor:
        self._side.join()
        return self.encoding.decode(fields, self._dtype)

    def _sources(
        self, slots: np.ndarray, wanted: np.ndarray
    ) -> list[tuple[np.ndarray, tuple[int, BoundaryStore | None]]]:
        """Positions in `slots` grouped by the highest level up to the visit's that is stored of them."""
        best = np.zeros(len(slots), np.int32)
        names = np.full(len(slots), "", object)
        for name, kept in self._stores.items():
            levels = kept.ledger.levels[slots]
            better = wanted & (levels > best) & (levels <= self.level)
            best[better], names[better] = levels[better], name
        groups = sorted({(int(best[i]), str(names[i])) for i in np.flatnonzero(wanted)})
        return [
            (np.flatnonzero(wanted & (best == level) & (names == name)), (level, self._stores.get(name)))
            for level, name in groups
        ]

    def _compute(self, level: int, hidden: Tensor | None, slots: np.ndarray, batch: Batch) -> Tensor:
        """Run `batch` from `hidden` at `level` (0: its inputs) up to the visit's level; store what it passes."""
        targets = [self.level] if self._levels is None else [at for at in self._levels if level < at <= self.level]
        states = self.cut.states(batch, targets, start=level, hidden=hidden)
        result = states[self.level]
        if not self.statistics.computed:
            self.statistics.encoding_error = self.encoding.error(result)
        for at in targets:
            fields = self.encoding.encode(states[at])
            self._put(self._store_of(at), slots, at, fields)
            if at == self.level:  # what is trained on is what will be read later, also the first time
                result = self.encoding.decode(fields, self._dtype)
        self.statistics.computed += len(slots)
        run = (level, self.level)
        self.statistics.layers_run[run] = self.statistics.layers_run.get(run, 0) + len(slots)
        return result

    def _put(self, kept: BoundaryStore, slots: np.ndarray, level: int, fields: Fields) -> None:
        kept.ledger.unmark(slots)
        kept.store.write(slots, fields)
        kept.ledger.mark(slots, level, fields)

    def _store_of(self, level: int) -> BoundaryStore:
        return self._stores[self._store_name(level)]

    def _store_name(self, level: int) -> str:
        """Where rows of `level` go: a kept of their own if levels are kept, else the one of their layout."""
        return f"level-{level}" if self._levels is not None else self._current

    def _claim(self, level: int, layout: RowLayout) -> None:
        """See that there is a kept for rows of `level`."""
        if self._levels is None:
            same = [name for name, kept in self._stores.items() if kept.layout == layout]
            self._current = same[0] if same else "rows-" + "x".join(str(n) for n in layout["data"].shape)
        name = self._store_name(level)
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
            self.statistics.damaged += ledger.refuse_damaged(store)

    def _drop_useless(self, level: int, now: Fingerprints) -> None:
        """Refuse stale rows; close stores that hold nothing from which this visit could go on."""
        held = {int(at) for kept in self._stores.values() for at in np.unique(kept.ledger.levels)}
        made_now = now.at({at for at in held if at} | {level} | set(self._levels or ()))
        for kept in self._stores.values():
            self.statistics.stale += kept.ledger.refuse_stale(made_now)
        if self._levels is not None:
            return
        best = np.zeros(self._num_slots, np.int32)
        for kept in self._stores.values():
            kept.ledger.unmark(np.flatnonzero(kept.ledger.levels > level))
            np.maximum(best, kept.ledger.levels, out=best)
        for name, kept in list(self._stores.items()):
            kept.ledger.unmark(np.flatnonzero(kept.ledger.levels < best))  # moved up to a kept of another shape
            if name != self._store_name(level) and not kept.ledger.levels.any():
                self._stores.pop(name).close()


def _rows_of(batch: Batch, rows: np.ndarray, count: int) -> dict[str, Any]:
    """The batch's `rows`; the batch itself where that is all of them, in order."""
    if len(rows) == count:
        return dict(batch)
    return {
        name: value[torch.from_numpy(rows).to(value.device)] if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }

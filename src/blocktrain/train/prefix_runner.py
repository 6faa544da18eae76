"""The prefix cache in a run: decide at each visit, open, feed the steps, and say what it did.

The cache never decides what is learned: with `dtype = "compute"` a run has the same losses and weights with it,
without it, and when it breaks down half-way (a full disk), bit for bit in fp32 on a CPU.

Of several ranks each fills and reads the slots of its own rows, so no hidden states travel. Rank 0 decides for all.
Where the ranks can only run layers together (FSDP2), they also fill together, and give the cache up together.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from blocktrain.cache.cost_model import (
    CacheDecision,
    CacheFacts,
    CachePlace,
    VisitReuse,
    choose,
)
from blocktrain.cache.encoding import Encoding
from blocktrain.cache.ledger import Fingerprints
from blocktrain.cache.prefix_cache import PrefixCache, Statistics
from blocktrain.cache.store import layout_of, slot_bytes
from blocktrain.chain.block import Block
from blocktrain.chain.boundary import BoundaryError, BoundaryRunner
from blocktrain.chain.chain import Layer
from blocktrain.data.sampling import StepRows
from blocktrain.errors import StorageError
from blocktrain.parallel.ranks import Ranks
from blocktrain.probe import Bandwidths, free_bytes, measure_bandwidths
from blocktrain.records.log import Event
from blocktrain.runtime import synchronize
from blocktrain.schedule import Visit
from blocktrain.train.cached_rows import boundary_runner, fill_ahead, fingerprints, key_of, new_cache, sample
from blocktrain.train.context import TrainingContext

log = logging.getLogger(__name__)


class PrefixRunner:
    """Runs the steps of a context's visits with the frozen prefix stored where that pays.

    forward_flops: of each layer, for the rows of one optimizer step. before: what `did` said when the run was saved in
    the middle of a visit, for a run that goes on from there.
    """

    def __init__(
        self, context: TrainingContext, folder: Path, forward_flops: Sequence[int], *, before: Event | None = None
    ):
        self.context = context
        self.folder = folder
        self._mine = folder / "prefix" / f"rank-{context.ranks.rank}"  # of a file store
        self.broken: str | None = None  # why caching was given up for the rest of the run
        self._whole = [flops / context.geometry.rows_per_step for flops in forward_flops]  # of each layer, one row
        self._forward = self._whole  # without layers that the visit leaves out
        self._cut = boundary_runner(context)
        self._levels = {block.index: _level(context, block) for block in context.partition}
        self._cache: PrefixCache | None = None
        self._place: CachePlace = "host"
        self._rates: Bandwidths | None = None  # measured once, when first asked for
        self._choice: CacheDecision | None = None
        self._flops_per_second = float("inf")
        self._row_bytes = 0  # of a row's stored states
        self._saved = 0  # FLOPs, in a visit whose cache was given up
        self._told = 0  # FLOPs of the visit that `newly_saved` has told of
        self.level = 0  # the boundary below the current visit's block
        self._now = Fingerprints(context.partition.chain)  # of the weights at its start
        self._given_up: str | None = None  # during the current visit, and not yet logged
        self._before = before

    # -- a visit --------------------------------------------------------------------------------------------------

    def open(self, visit: Visit, *, decided: Event | None = None, without: Collection[Layer] = ()) -> Event | None:
        """Decide for a visit and open its cache; the record to log, None where there is nothing to decide.

        decided: that record, for a visit that is resumed: its rows lie where it says. without: layers that the visit
            leaves out, as it does here already: passing them saves nothing.
        """
        layers = self.context.partition.chain.layers
        self._forward = [0 if layer in without else cost for layer, cost in zip(layers, self._whole, strict=True)]
        self._choice, self._saved, self._told = None, 0, 0
        self._now = fingerprints(self.context, self._levels.values())
        level = self.level = self._levels[visit.block.index]
        if self._cache is not None and not self._cache.holds(key_of(self.context, visit)):
            self._cache.clear()  # another subset's rows: nobody will ask for them again
        if level == 0 or self.context.config.prefix.store == "off":
            return None
        refused = _refusal(self.context)
        if refused is None and self.context.ranks.rank0_broadcast(lambda: self.broken is None):
            self._look(visit, level)
        choice = self.context.ranks.rank0_broadcast(lambda: self._choose(visit, level, refused, decided))
        self._given_up = None  # the record has it
        if choice is None:
            return None
        if choice["place"] is not None and self.broken is None:
            self._choice = CacheDecision(**choice)
            try:
                self._open_cache(visit, level, choice["place"])
            except (BoundaryError, StorageError) as error:
                self._give_up(error)
                choice["reason"], self._given_up = self.broken, None
        self.context.ranks.barrier()
        place = self._place if self.active else None
        return {"kind": "cache", "place": place, "reason": choice["reason"], "level": level}

    def running(self, rows: StepRows, batch: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Inside, the model runs `batch` from the visit's boundary; as it is, where nothing is cached."""
        if not self.active or self._cache is None:
            return nullcontext()
        try:
            hidden = self._cache.fetch(rows.slots, batch)
        except StorageError as error:
            self._give_up(error)
            return nullcontext()
        return self._cut.running(level=self._cache.level, hidden=hidden)

    def states(self, rows: StepRows, batch: Mapping[str, Tensor]) -> Tensor:
        """Hidden states (B, ...) at the visit's boundary: stored ones, or computed where nothing is cached."""
        if self.active and self._cache is not None:
            try:
                return self._cache.fetch(rows.slots, batch)
            except StorageError as error:
                self._give_up(error)
        return self._cut.states(batch, [self.level])[self.level]

    def prefetch(self, rows: StepRows) -> None:
        """Start reading what the next call of `running` will want."""
        if self.active and self._cache is not None:
            self._cache.prefetch(rows.slots)

    @property
    def active(self) -> bool:
        """Whether this visit's steps run from stored hidden states."""
        return self._choice is not None and self._choice.place is not None and self.broken is None

    def did(self) -> Event | None:
        """What the caches of all ranks did in the visit so far, in all sessions of the run, as a record to log; None
        where there was none."""
        cache = self._cache if self.active else None
        seen = Statistics() if cache is None else cache.statistics
        did = _added_up(self.context.ranks, seen, saved=0 if cache is None else self.flops_saved())
        if cache is None:
            return self._before
        seconds = did["flops_saved"] / self._flops_per_second / self.context.ranks.size - did["wait_seconds"]
        record = {"kind": "cached", "place": self._place, "dtype": self.context.config.prefix.dtype, **did}
        record["seconds_saved"] = round(seconds, 4)
        return record if self._before is None else _one_after_another(self._before, record)

    def close_visit(self) -> Event | None:
        """The visit is over: the record to log of it."""
        did, given_up = self.did(), self._given_up
        self._before = self._choice = self._given_up = None
        if given_up is not None:
            return {"kind": "cache", "place": None, "reason": given_up, "level": self.level}
        return did

    def newly_saved(self) -> int:
        """`flops_saved` since the last call."""
        before, self._told = self._told, self.flops_saved()
        return self._told - before

    def flops_saved(self) -> int:
        """FLOPs that this rank has not spent in the visit so far, against the same steps without a cache: their prefix
        passes, less what was spent to fill."""
        if not self.active or self._cache is None:
            return self._saved
        seen = self._cache.statistics
        filled = sum(rows * self._flops(*run) for run, rows in seen.layers_run.items())
        return round(seen.asked * self._flops(0, self._cache.level) - filled)

    def __enter__(self) -> PrefixRunner:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The run has ended, or is interrupted: then it will look for its files again."""
        if self._cache is not None:
            self._cache.close(keep_files=kind is not None)
        if kind is None:
            shutil.rmtree(self._mine, ignore_errors=True)
            self.context.ranks.barrier()
            if self.context.ranks.is_rank0:
                shutil.rmtree(self.folder / "prefix", ignore_errors=True)

    # -- deciding -------------------------------------------------------------------------------------------------

    def _look(self, visit: Visit, level: int) -> None:
        """Check the cut, measure FLOPs per second of the prefix and the size of what is stored."""
        micro_rows = self.context.micro_rows
        try:
            self._cut.check(sample(self.context, visit, 1), level)
            seconds, states = _pass(self._cut, sample(self.context, visit, micro_rows), level)
        except BoundaryError as error:
            self._give_up(error)
            return
        self._flops_per_second = max(1.0, micro_rows * self._flops(0, level) / seconds)
        self._row_bytes = slot_bytes(layout_of(Encoding(self.context.config.prefix.dtype).encode(states)))

    def _choose(self, visit: Visit, level: int, refused: str | None, decided: Event | None) -> dict[str, Any] | None:
        """The fields of a `CacheDecision`, decided now or taken from the record `decided`; None where there is nothing
        left to decide."""
        if self.broken is not None:
            if self._given_up is None:
                return None
            refused = self._given_up
        if refused is not None:
            return {"place": None, "reason": refused}
        if decided is not None:
            return {"place": decided["place"], "reason": decided["reason"]}
        try:
            return asdict(self._decide(visit, level))
        except StorageError as error:
            self._give_up(error)
            return {"place": None, "reason": self.broken}

    def _decide(self, visit: Visit, level: int) -> CacheDecision:
        """Count, measure, choose."""
        context, config = self.context, self.context.config.prefix
        kept = len([at for at in self._kept() or (level,) if at <= level])
        free: dict[CachePlace, float] = free_bytes(context.device, self.folder)
        shared_by: dict[CachePlace, int] = {"device": 1, "host": context.ranks.local_size, "file": context.ranks.size}
        if self._cache is not None:  # it is not in its own way
            free[self._place] = free.get(self._place, 0.0) + self._cache.nbytes * shared_by[self._place]
        free = {place: amount / shared_by[place] for place, amount in free.items()}
        if self._rates is None:
            measured = config.store == "auto"
            self._rates = measure_bandwidths(context.device, self.folder) if measured else Bandwidths(read={}, write={})
        facts = CacheFacts(
            needs=self._needs(visit, level),
            num_slots=context.rows.num_slots,
            row_bytes=self._row_bytes,
            boundaries=kept,
            flops_per_second=self._flops_per_second,
            read_bytes_per_second=self._rates.read,
            write_bytes_per_second=self._rates.write,
            free_bytes=free,
        )
        return choose(facts, config.store)

    def _needs(self, visit: Visit, level: int) -> list[VisitReuse]:
        """This visit's, and those of the sweep's later visits that find this one's rows stored."""
        context = self.context
        uses = self._uses(visit)
        key = key_of(context, visit)
        held = {0: 1} if self._cache is None else self._cache.held(level, key=key, now=self._now)
        fill = sum(count * self._flops(at, level) for at, count in held.items()) / sum(held.values())
        needs = [VisitReuse(uses=uses, prefix_flops=round(self._flops(0, level)), fill_flops=fill)]
        subset, before = context.rows.subset(visit=visit.index, sweep=visit.sweep), level
        for later in context.schedule.visits(context.partition, start=visit.index + 1):
            at = self._levels[later.block.index]
            same = later.sweep == visit.sweep and context.rows.subset(visit=later.index, sweep=later.sweep) == subset
            if not same or self._uses(later) < 1 or not at:
                break
            if self._kept():
                fill = 0.0
            elif at > before:
                fill = self._flops(before, at)
            else:
                break
            needs.append(VisitReuse(uses=self._uses(later), prefix_flops=round(self._flops(0, at)), fill_flops=fill))
            before = at
        return needs

    def _uses(self, visit: Visit) -> float:
        """How often a visit asks for each row."""
        geometry = self.context.geometry
        return (
            visit.duration.in_steps(geometry)
            * geometry.rows_per_step
            / self.context.ranks.size
            / self.context.rows.num_slots
        )

    def _kept(self) -> list[int] | None:
        """In descending order every boundary is kept, as none goes stale before its visit."""
        if self.context.schedule.order != "descending":
            return None
        wanted = [level for level in self._levels.values() if level]
        if self.context.config.prefix.store == "auto":  # which never pays for a boundary that costs nothing to reach
            wanted = [level for level in wanted if self._flops(0, level)]
        return sorted(wanted)

    # -- parts ----------------------------------------------------------------------------------------------------

    def _open_cache(self, visit: Visit, level: int, place: CachePlace) -> None:
        if self._cache is not None and place != self._place:
            self._cache.close()
            self._cache = None
        self._place = place
        if self._cache is None:
            self._cache = new_cache(self.context, self._cut, place, folder=self._mine, levels=self._kept())
        self._cache.open(level, key=key_of(self.context, visit), sample=sample(self.context, visit, 1), now=self._now)
        if self.context.config.prefix.fill == "ahead":
            fill_ahead(self.context, self._cache, visit)

    def _flops(self, start: int, end: int) -> float:
        """Of one row's forward pass through layers [start, end)."""
        return sum(self._forward[start:end])

    def _give_up(self, error: Exception) -> None:
        """Go on without a cache, and say so once."""
        self._saved = self.flops_saved()
        self.broken = self._given_up = f"given up: {error}"
        log.warning("training goes on without a prefix cache: %s", error)
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def _refusal(context: TrainingContext) -> str | None:
    """Why the prefix of this run cannot be stored at all."""
    if context.config.blocks.frozen_dropout:
        return "refused: dropout acts in frozen layers (blocks.frozen_dropout), so the prefix differs each time"
    if context.task.augmented and context.config.sampling.variants is None:
        return "refused: images are augmented anew in each pass; set sampling.variants = 1 (frozen) or more"
    return None


def _added_up(ranks: Ranks, seen: Statistics, *, saved: int) -> dict[str, Any]:
    """The fields of a record over all ranks: counts in sum, seconds as their mean, for ranks wait side by side."""
    counts = {
        "bytes": seen.bytes_stored,
        "rows": seen.asked,
        "hits": seen.hits,
        "computed": seen.computed,
        "stale": seen.stale,
        "damaged": seen.damaged,
        "flops_saved": saved,
    }
    seconds = {"fill_seconds": seen.fill_seconds, "wait_seconds": seen.wait_seconds}
    told = [sum(values) for values in zip(*ranks.all_gather([*counts.values(), *seconds.values()]), strict=True)]
    return {
        **{name: int(value) for name, value in zip(counts, told, strict=False)},
        **{name: round(value / ranks.size, 4) for name, value in zip(seconds, told[len(counts) :], strict=True)},
        "encoding_error": seen.encoding_error,
    }


def _one_after_another(before: Event, now: Event) -> Event:
    """Two sessions' records of a visit as one: sums, but for the room claimed, which is what it is now."""
    alone = {"kind", "place", "dtype", "bytes", "encoding_error"}
    sums = {name: round(before[name] + now[name], 4) for name in now if name not in alone}
    return {**now, **sums, "encoding_error": max(before["encoding_error"], now["encoding_error"])}


def _level(context: TrainingContext, block: Block) -> int:
    """The boundary below a block's first layer."""
    return context.partition.chain.layers.index(block.layers[0])


def _pass(cut: BoundaryRunner, batch: Mapping[str, Tensor], level: int) -> tuple[float, Tensor]:
    """Seconds of the prefix on a batch, the better of two passes, and the states at its end."""
    device, best, states = next(iter(batch.values())).device, float("inf"), None
    for _ in range(2):
        synchronize(device)
        start = time.perf_counter()
        states = cut.states(batch, [level])[level]
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    assert states is not None
    return best, states

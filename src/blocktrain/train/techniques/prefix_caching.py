"""The technique behind `[prefix]`: decides at each visit whether the prefix cache pays, and feeds the steps from it.

The cache never decides what is learned: with `dtype = "compute"` a run has the same losses and weights with it,
without it, and when it breaks down half-way (a full disk), bit for bit in fp32 on a CPU.

Each rank fills and reads the slots of its own rows, so no hidden states travel between ranks. Rank 0 decides for all.
Where the ranks can only run layers together (FSDP2), they also fill together, and give the cache up together.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from blocktrain.cache.cost_model import CacheFacts, StoreChoice, VisitReuse, choose
from blocktrain.cache.encoding import Encoding
from blocktrain.cache.prefix_cache import CacheStatistics, PrefixCache
from blocktrain.cache.slot_ledger import Fingerprints
from blocktrain.cache.store import STORES, layout_of, slot_bytes
from blocktrain.chain.boundary import BoundaryError, BoundaryRunner
from blocktrain.chain.chain import Layer
from blocktrain.data.sampling import StepRows
from blocktrain.errors import StorageError
from blocktrain.parallel.fsdp import ShardedBoundaryRunner
from blocktrain.probe import Bandwidths, Medium, free_bytes, measure_bandwidths
from blocktrain.records.run_records import CacheDecision, CacheUse, Opening, Record
from blocktrain.runtime import synchronize
from blocktrain.schedule import Visit
from blocktrain.train.context import TrainingContext, is_pipeline, is_sharded, pipeline_config
from blocktrain.train.technique import Batch, Position, Technique
from blocktrain.train.techniques.prefix_cache_setup import (
    fill_ahead,
    fingerprints,
    key_of,
    new_cache,
    room_for_checkpoints,
    sample,
)

log = logging.getLogger(__name__)

# What a visit's sessions add up; `bytes` is the room that is claimed now, `encoding_error` the largest.
_SUMS = ("rows", "hits", "computed", "stale", "damaged", "flops_saved", "fill_seconds", "wait_seconds", "seconds_saved")


class PrefixCaching(Technique):
    """Runs the steps of a run's visits from stored hidden states where that pays.

    forward_flops: of each layer, for the rows of one optimizer step. step_bytes: the most device memory that a visit
        takes beside the model's weights, which is no room for a cache.
    """

    def __init__(self, context: TrainingContext, folder: Path, forward_flops: Sequence[int], step_bytes: int = 0):
        self.context = context
        self.folder = folder
        self._rank_folder = folder / "prefix" / f"rank-{context.ranks.rank}"  # of a file store
        self.broken: str | None = None  # why caching was given up for the rest of the run
        self._row_flops = [flops / context.geometry.rows_per_step for flops in forward_flops]  # of each layer
        self._forward = self._row_flops  # without the layers that the visit leaves out
        is_collective = is_sharded(context.config, context.ranks)
        self._runner = (ShardedBoundaryRunner if is_collective else BoundaryRunner)(context.partition.chain)
        self._boundaries = {block.index: block.boundary for block in context.partition}
        self._cache: PrefixCache | None = None
        self._step_bytes = step_bytes
        self._place = "host"  # a name in `STORES`
        self._bandwidths: Bandwidths | None = None  # measured once, when first needed
        self._choice: StoreChoice | None = None
        self._flops_per_second = float("inf")
        self._row_bytes = 0  # of a row's stored states
        self._saved_before_giving_up = 0  # FLOPs, in a visit whose cache was given up
        self._reported = 0  # FLOPs of the visit that `flops_saved` has returned so far
        self.boundary = 0  # the one below the current visit's block
        self._fingerprints = Fingerprints(context.partition.chain)  # of the weights at the visit's start
        self._given_up: str | None = None  # why, during the current visit, and not yet logged
        self._decided: dict[str, Any] | None = None  # the decision on the current visit, for a checkpoint
        self._earlier: dict[str, Any] | None = None  # what the cache did in the visit's earlier sessions

    # -- a visit --------------------------------------------------------------------------------------------------

    def open_visit(self, visit: Visit, left_out: Sequence[Layer], position: Position) -> Sequence[Record]:
        """Decide for a visit and open its cache. No record where there is nothing to decide.

        A visit that is resumed keeps its decision: its rows lie where that says. Layers that the visit leaves out cost
        nothing, so passing them saves nothing.
        """
        layers = self.context.partition.chain.layers
        self._forward = [0 if layer in left_out else cost for layer, cost in zip(layers, self._row_flops, strict=True)]
        self._choice, self._saved_before_giving_up, self._reported = None, 0, 0
        boundary = self.boundary = self._boundaries[visit.block.index]
        if self._cache is not None and not self._cache.matches(key_of(self.context, visit)):
            self._cache.clear()  # rows of another subset: no later visit will read them
        if boundary == 0 or self.context.config.prefix.store == "off":
            return []
        self._fingerprints = fingerprints(self.context, self._boundaries.values())
        refused = _refusal(self.context)
        if refused is None and self.context.ranks.rank0_broadcast(lambda: self.broken is None):
            self._measure(visit, boundary)
        decided = self._decided if self._decided is not None and self._decided["visit"] == visit.index else None
        choice = self.context.ranks.rank0_broadcast(lambda: self._choose(visit, boundary, refused, decided))
        self._given_up = None  # the record below says it
        if choice is None:
            return []
        if choice["place"] is not None and self.broken is None:
            self._choice = StoreChoice(**choice)
            try:
                self._open_cache(visit, boundary, choice["place"])
            except (BoundaryError, StorageError) as error:
                self._give_up(error)
                choice["reason"], self._given_up = self.broken, None
        self.context.ranks.barrier()
        place = None if self.active_cache is None else self._place
        self._decided = {"visit": visit.index, "place": place, "reason": choice["reason"]}
        return [CacheDecision(place=place, reason=str(choice["reason"]), level=boundary, **position.fields())]

    def around_batch(self, rows: StepRows, batch: Batch) -> AbstractContextManager[object]:
        """Inside, the model runs `batch` from the visit's boundary; as it is, where nothing is cached."""
        cache = self.active_cache
        if cache is None:
            return nullcontext()
        try:
            hidden = cache.fetch(rows.slots, batch)
        except StorageError as error:
            self._give_up(error)
            return nullcontext()
        return self._runner.running(start=cache.boundary, hidden=hidden)

    def states(self, rows: StepRows, batch: Batch) -> Tensor:
        """Hidden states (B, ...) at the visit's boundary: stored ones, or computed where nothing is cached."""
        if self.active_cache is not None:
            try:
                return self.active_cache.fetch(rows.slots, batch)
            except StorageError as error:
                self._give_up(error)
        return self._runner.states(batch, [self.boundary])[self.boundary]

    def prefetch(self, rows: StepRows) -> None:
        """Start reading what the next micro-batch will need."""
        if self.active_cache is not None:
            self.active_cache.prefetch(rows.slots)

    @property
    def active_cache(self) -> PrefixCache | None:
        """The cache, where this visit's steps run from stored hidden states."""
        is_used = self._choice is not None and self._choice.place is not None and self.broken is None
        return self._cache if is_used else None

    def close_visit(self, position: Position) -> Sequence[Record]:
        """What the cache did in the visit, or why it was given up."""
        use, given_up = self._use(), self._given_up
        self._earlier = self._decided = self._choice = self._given_up = None
        if given_up is not None:
            return [CacheDecision(place=None, reason=given_up, level=self.boundary, **position.fields())]
        return [] if use is None else [CacheUse(**use, **position.fields())]

    def state(self) -> dict[str, Any]:
        """The current visit's decision, and what its cache did so far. Collective."""
        return {"decided": self._decided, "use": self._use()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `Technique`."""
        self._decided, self._earlier = state["decided"], state["use"]

    def flops_saved(self) -> int:
        """FLOPs that this rank was spared since the last call, less what was spent to fill the cache."""
        before, self._reported = self._reported, self._visit_flops_saved()
        return self._reported - before

    def _visit_flops_saved(self) -> int:
        """The prefix passes that this rank's steps did not run in the visit so far, less what was spent to fill."""
        if self.active_cache is None:
            return self._saved_before_giving_up
        seen = self.active_cache.statistics
        filled = sum(rows * self._flops(*run) for run, rows in seen.layers_run.items())
        return round(seen.requested * self._flops(0, self.active_cache.boundary) - filled)

    def _use(self) -> dict[str, Any] | None:
        """What the caches of all ranks did in the visit so far, in all sessions of the run, as the fields of a
        `CacheUse`; None where there was none. Collective.

        Counts are summed over the ranks and seconds averaged, because ranks wait side by side.
        """
        ranks = self.context.ranks
        seen = CacheStatistics() if self.active_cache is None else self.active_cache.statistics
        counts = {
            "bytes": seen.bytes_stored,
            "rows": seen.requested,
            "hits": seen.hits,
            "computed": seen.computed,
            "stale": seen.stale,
            "damaged": seen.damaged,
            "flops_saved": 0 if self.active_cache is None else self._visit_flops_saved(),
        }
        seconds = {"fill_seconds": seen.fill_seconds, "wait_seconds": seen.wait_seconds}
        sums = [sum(values) for values in zip(*ranks.all_gather([*counts.values(), *seconds.values()]), strict=True)]
        if self.active_cache is None:
            return self._earlier
        use: dict[str, Any] = {"place": self._place, "dtype": self.context.config.prefix.dtype}
        use |= {name: int(value) for name, value in zip(counts, sums, strict=False)}
        use |= {name: round(value / ranks.size, 4) for name, value in zip(seconds, sums[len(counts) :], strict=True)}
        use["encoding_error"] = seen.encoding_error
        computing = use["flops_saved"] / self._flops_per_second / ranks.size
        use["seconds_saved"] = round(computing - use["wait_seconds"], 4)
        if self._earlier is not None:
            use |= {name: round(self._earlier[name] + use[name], 4) for name in _SUMS}
            use["encoding_error"] = max(self._earlier["encoding_error"], use["encoding_error"])
        return use

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Files stay where the run is interrupted: it will look for them when it is resumed."""
        try:
            yield
        except BaseException:
            if self._cache is not None:
                self._cache.close(keep_files=True)
            raise
        if self._cache is not None:
            self._cache.close()
        shutil.rmtree(self._rank_folder, ignore_errors=True)
        self.context.ranks.barrier()
        if self.context.ranks.is_rank0:
            shutil.rmtree(self.folder / "prefix", ignore_errors=True)

    # -- deciding -------------------------------------------------------------------------------------------------

    def _measure(self, visit: Visit, boundary: int) -> None:
        """Check the cut, measure FLOPs per second of the prefix and the size of what is stored."""
        micro_rows = self.context.micro_rows
        try:
            self._runner.check(sample(self.context, visit, 1), boundary)
            batch = sample(self.context, visit, micro_rows)
            seconds, states, device = float("inf"), None, next(iter(batch.values())).device
            for _ in range(2):  # the better of two passes
                synchronize(device)
                start = time.perf_counter()
                states = self._runner.states(batch, [boundary])[boundary]
                synchronize(device)
                seconds = min(seconds, time.perf_counter() - start)
        except BoundaryError as error:
            self._give_up(error)
            return
        assert states is not None
        self._flops_per_second = max(1.0, micro_rows * self._flops(0, boundary) / seconds)
        self._row_bytes = slot_bytes(layout_of(Encoding(self.context.config.prefix.dtype).encode(states)))

    def _choose(
        self, visit: Visit, boundary: int, refused: str | None, decided: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        """The fields of a `StoreChoice`, decided now or taken from the record `decided`; None where there is nothing
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
            return asdict(self._decide(visit, boundary))
        except StorageError as error:
            self._give_up(error)
            return {"place": None, "reason": self.broken}

    def _decide(self, visit: Visit, boundary: int) -> StoreChoice:
        """Count, measure, choose."""
        context, config = self.context, self.context.config.prefix
        kept = len([at for at in self._kept() or (boundary,) if at <= boundary])
        free: dict[Medium, float] = free_bytes(context.device, self.folder)
        shared_by: dict[Medium, int] = {"device": 1, "host": context.ranks.local_size, "file": context.ranks.size}
        if self._cache is not None:  # its own room is free for it
            medium = STORES[self._place].medium
            free[medium] = free.get(medium, 0.0) + self._cache.nbytes * shared_by[medium]
        free["file"] -= room_for_checkpoints(context)
        free = {place: amount / shared_by[place] for place, amount in free.items()}
        if "device" in free:  # a visit may come that needs more than this one
            free["device"] = max(0.0, free["device"] - self._step_bytes)
        if self._bandwidths is None:
            measured = config.store == "auto"
            self._bandwidths = (
                measure_bandwidths(context.device, self.folder) if measured else Bandwidths(read={}, write={})
            )
        facts = CacheFacts(
            visits=self._needs(visit, boundary),
            num_slots=context.rows.num_slots,
            row_bytes=self._row_bytes,
            boundaries=kept,
            flops_per_second=self._flops_per_second,
            read_bytes_per_second=self._bandwidths.read,
            write_bytes_per_second=self._bandwidths.write,
            free_bytes=free,
        )
        return choose(facts, config.store)

    def _needs(self, visit: Visit, boundary: int) -> list[VisitReuse]:
        """This visit's, and those of the sweep's later visits that find this one's rows stored."""
        context = self.context
        uses = self._uses(visit)
        key = key_of(context, visit)
        held = (
            {0: 1}
            if self._cache is None
            else self._cache.rows_by_source(boundary, key=key, fingerprints=self._fingerprints)
        )
        fill = sum(count * self._flops(at, boundary) for at, count in held.items()) / sum(held.values())
        needs = [VisitReuse(uses=uses, prefix_flops=round(self._flops(0, boundary)), fill_flops=fill)]
        subset, before = context.rows.subset(visit=visit.index, sweep=visit.sweep), boundary
        for later in context.schedule.visits(context.partition, start=visit.index + 1):
            at = self._boundaries[later.block.index]
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
        """How often the steps of a visit need each row."""
        geometry = self.context.geometry
        return (
            visit.duration.in_steps(geometry)
            * geometry.rows_per_step
            / self.context.ranks.size
            / self.context.rows.num_slots
        )

    def _kept(self) -> list[int] | None:
        """The boundaries that are kept. In descending order all are, because none goes stale before its visit."""
        if not self.context.schedule.keeps_boundaries():
            return None
        wanted = [boundary for boundary in self._boundaries.values() if boundary]
        if self.context.config.prefix.store == "auto":  # which never pays for a boundary that costs nothing to reach
            wanted = [boundary for boundary in wanted if self._flops(0, boundary)]
        return sorted(wanted)

    # -- parts ----------------------------------------------------------------------------------------------------

    def _open_cache(self, visit: Visit, boundary: int, place: str) -> None:
        if self._cache is not None and place != self._place:
            self._cache.close()
            self._cache = None
        self._place = place
        if self._cache is None:
            self._cache = new_cache(
                self.context, self._runner, place, folder=self._rank_folder, boundaries=self._kept()
            )
        self._cache.open(
            boundary,
            key=key_of(self.context, visit),
            sample=sample(self.context, visit, 1),
            fingerprints=self._fingerprints,
        )
        if self.context.config.prefix.fill == "ahead":
            fill_ahead(self.context, self._cache, visit)

    def _flops(self, start: int, end: int) -> float:
        """FLOPs of one row's forward pass through layers [start, end)."""
        return sum(self._forward[start:end])

    def _give_up(self, error: Exception) -> None:
        """Continue without a cache, and warn once."""
        self._saved_before_giving_up = self._visit_flops_saved()
        self.broken = self._given_up = f"given up: {error}"
        log.warning("training goes on without a prefix cache: %s", error)
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def _refusal(context: TrainingContext) -> str | None:
    """Why the prefix of this run cannot be stored at all."""
    if context.config.blocks.frozen_dropout:
        return "refused: dropout acts in frozen layers (blocks.frozen_dropout), so the prefix differs each time"
    if context.data.augmented and context.config.sampling.variants is None:
        return "refused: images get new random augmentations in each pass; set sampling.variants = 1 (frozen) or more"
    return None


def build(context: TrainingContext, opening: Opening, folder: Path) -> PrefixCaching | None:
    """Every run has it, except a pipeline whose rows all begin at the inputs."""
    begins_at_inputs = is_pipeline(context.config, context.ranks) and pipeline_config(context.config).start == "inputs"
    if begins_at_inputs:
        return None
    own = ("frozen", "active", "buffers")  # there already
    step_bytes = [
        sum(peak.parts.values()) - sum(peak.parts.get(part, 0) for part in own) for peak in opening.memory.blocks
    ]
    return PrefixCaching(context, folder, opening.costs.flops.forward_layers, max(step_bytes, default=0))

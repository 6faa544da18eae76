"""Sets up the prefix cache of a run: chooses its class, builds its keys and fingerprints, fills it ahead of time.

With sharded weights (FSDP2) layers run on all ranks together, and so do the forward passes of the cache.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import transformers
from torch import Tensor

from blocktrain.cache.collective_prefix_cache import CollectivePrefixCache
from blocktrain.cache.encoding import Encoding
from blocktrain.cache.prefix_cache import PrefixCache
from blocktrain.cache.slot_ledger import Fingerprints, Key
from blocktrain.cache.store import STORES, RowLayout, Store
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.data.sampling import StepRows
from blocktrain.errors import StorageError
from blocktrain.runtime import to_device
from blocktrain.schedule import Visit
from blocktrain.train.context import TrainingContext, is_sharded
from blocktrain.units import format_bytes


def new_cache(
    context: TrainingContext, runner: BoundaryRunner, place: str, *, folder: Path, boundaries: Sequence[int] | None
) -> PrefixCache:
    """An empty cache with stores of the kind that `STORES` has under `place`.

    folder: of this rank in `prefix/` of the run's, for files. boundaries: see `PrefixCache`.

    A store in files that would not leave room for two checkpoints raises `StorageError` when it is made.
    """
    encoding, slots, ranks = Encoding(context.config.prefix.dtype), context.rows.num_slots, context.ranks

    def make_store(name: str, num_slots: int, layout: RowLayout) -> Store:
        store = STORES[place].make(folder / name, num_slots, layout, context.device)
        left, needed = shutil.disk_usage(folder.parent.parent).free, room_for_checkpoints(context)
        if STORES[place].medium == "file" and left < needed:  # the store has reserved its room by now
            store.close()
            raise StorageError(
                f"with {format_bytes(store.nbytes)} of stored rows, '{folder}' would have {format_bytes(left)} left, "
                f"and the next two checkpoints may need {format_bytes(needed)}; free some space or set prefix.store"
            )
        return store

    def all_gather(number: int) -> list[int]:
        return [int(value) for (value,) in ranks.all_gather([number])]

    kind = partial(CollectivePrefixCache, all_gather=all_gather) if is_sharded(context.config, ranks) else PrefixCache
    return kind(
        runner,
        num_slots=slots,
        encoding=encoding,
        make_store=make_store,
        boundaries=boundaries,
        block_boundaries=[block.boundary for block in context.partition],
    )


def room_for_checkpoints(context: TrainingContext) -> int:
    """Bytes that the next two checkpoints may need on the disk: fp32 weights (or bf16 and low bits) and two averages in
    fp32 of every parameter, in case the file system has no hard links. What the cache takes must leave that free."""
    bytes_each = 4 if context.config.optimizer.state == "drop" else 12
    return 2 * bytes_each * sum(parameter.numel() for parameter in context.model.parameters())


def fingerprints(context: TrainingContext, boundaries: Iterable[int]) -> Fingerprints:
    """Hashes the weights below `boundaries` as they are now. Collective where weights are sharded."""
    chain, ranks = context.partition.chain, context.ranks
    if not is_sharded(context.config, ranks):
        return Fingerprints(chain)

    def combine(digest: str) -> str:
        return hashlib.sha256(repr(ranks.all_gather(list(bytes.fromhex(digest)))).encode()).hexdigest()

    hashed = Fingerprints(chain, combine=combine)
    hashed.at(boundaries)  # now, because every rank is here
    return hashed


def fill_ahead(context: TrainingContext, cache: PrefixCache, visit: Visit) -> None:
    """Compute every row of a visit before its first step, in batches of `fill_rows` and no gradients."""
    subset, count = context.rows.subset(visit=visit.index, sweep=visit.sweep), context.config.prefix.fill_rows
    for start in range(0, context.rows.num_slots, context.rows.stored_rows):  # one variant after another
        for at in range(start, end := start + context.rows.stored_rows, count):
            slots = np.arange(at, min(at + count, end))  # as a batch the same rows, whichever of them are missing
            if len(cache.missing(slots)):
                cache.fill(slots, batch_of(context, context.rows.slot_rows(slots, subset=subset)))


def key_of(context: TrainingContext, visit: Visit) -> Key:
    """Identifies what the slots hold: which rows of which data, augmented how, computed by which code."""
    subset = context.rows.subset(visit=visit.index, sweep=visit.sweep)
    return {
        "rows": hashlib.sha256(context.rows.subset_indices(subset).tobytes()).hexdigest(),
        "data": context.data.fingerprint,
        "first_variant": subset * (context.config.sampling.variants or 0),
        "transformers": transformers.__version__,
        "frozen_compute": context.config.memory.frozen_compute,
        "rank": [context.ranks.rank, context.ranks.size],  # whose slots these are
    }


def sample(context: TrainingContext, visit: Visit, rows: int) -> dict[str, Tensor]:
    """A batch of the first rows that a visit stores."""
    slots = np.arange(min(rows, context.rows.stored_rows))
    subset = context.rows.subset(visit=visit.index, sweep=visit.sweep)
    return batch_of(context, context.rows.slot_rows(slots, subset=subset))


def batch_of(context: TrainingContext, rows: StepRows) -> dict[str, Tensor]:
    """The model's inputs for these rows."""
    return to_device(context.data.train.batch(rows.rows, variant=rows.variant), context.device)

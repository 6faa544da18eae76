"""What a job stores of its frozen prefix: of which rows, made from which weights, in which kind of cache.

Where the weights are in parts (FSDP2), layers run on all processes together, and the cache's passes with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

from blocktrain.data.sampling import StepRows
from blocktrain.dist.sharding import ShardedCut
from blocktrain.model.cut import Cut
from blocktrain.prefix.cache import PrefixCache
from blocktrain.prefix.choice import Place
from blocktrain.prefix.encoding import Encoding
from blocktrain.prefix.ledger import Fingerprints, Key
from blocktrain.prefix.store import FileStore, Layout, MemoryStore, Store
from blocktrain.prefix.together import PrefixCacheTogether
from blocktrain.schedule import Visit
from blocktrain.train.job import Job, in_parts
from blocktrain.train.task import to_device


def cut_of(job: Job) -> Cut:
    """What runs parts of the job's model."""
    return (ShardedCut if in_parts(job.config, job.ranks) else Cut)(job.partition.chain)


def new_cache(job: Job, cut: Cut, place: Place, *, folder: Path, levels: Sequence[int] | None) -> PrefixCache:
    """An empty cache; folder: of this process, for files. levels: see `PrefixCache`."""
    encoding, slots, ranks = Encoding(job.config.prefix.dtype), job.rows.num_slots, job.ranks
    store = _store(place, folder, job.device)
    if not in_parts(job.config, ranks):
        return PrefixCache(cut, num_slots=slots, encoding=encoding, make_store=store, levels=levels)

    def gather(number: int) -> list[int]:
        return [int(told) for (told,) in ranks.gather([number])]

    return PrefixCacheTogether(cut, gather=gather, num_slots=slots, encoding=encoding, make_store=store, levels=levels)


def fingerprints(job: Job, levels: Iterable[int]) -> Fingerprints:
    """Of the weights below `levels` as they are now. Of all parts of weights that are in parts: all processes must
    call this."""
    chain, ranks = job.partition.chain, job.ranks
    if not in_parts(job.config, ranks):
        return Fingerprints(chain)

    def of_all(digest: str) -> str:
        return hashlib.sha256(repr(ranks.gather(list(bytes.fromhex(digest)))).encode()).hexdigest()

    now = Fingerprints(chain, together=of_all)
    now.at(levels)  # read while all are here
    return now


def fill_ahead(job: Job, cache: PrefixCache, visit: Visit) -> None:
    """Compute every row of a visit before its first step, in batches of `fill_rows` and no gradients."""
    subset, count = job.rows.subset(visit=visit.index, sweep=visit.sweep), job.config.prefix.fill_rows
    for start in range(0, job.rows.num_slots, job.rows.stored_rows):  # one variant after another
        missing = cache.missing(np.arange(start, start + job.rows.stored_rows))
        for at in range(0, len(missing), count):
            rows = job.rows.slot_rows(missing[at : at + count], subset=subset)
            cache.fill(rows.slots, batch_of(job, rows))


def key_of(job: Job, visit: Visit) -> Key:
    """What is in the slots: which rows, of which data, augmented how, computed by which code."""
    subset = job.rows.subset(visit=visit.index, sweep=visit.sweep)
    return {
        "rows": hashlib.sha256(job.rows.subset_indices(subset).tobytes()).hexdigest(),
        "data": job.task.fingerprint,
        "first_variant": subset * (job.config.sampling.variants or 0),
        "transformers": transformers.__version__,
        "rank": [job.ranks.rank, job.ranks.size],  # whose slots these are
    }


def sample(job: Job, visit: Visit, rows: int) -> dict[str, Tensor]:
    """A batch of the first rows that a visit stores."""
    slots = np.arange(min(rows, job.rows.stored_rows))
    subset = job.rows.subset(visit=visit.index, sweep=visit.sweep)
    return batch_of(job, job.rows.slot_rows(slots, subset=subset))


def batch_of(job: Job, rows: StepRows) -> dict[str, Tensor]:
    """The model's inputs for these rows."""
    return to_device(job.task.train.batch(rows.rows, variant=rows.variant), job.device)


def _store(place: Place, folder: Path, device: torch.device) -> Callable[[str, int, Layout], Store]:
    """What makes a store there, given a name in `folder`, a number of slots and what is in one."""
    match place:
        case "file":
            return lambda name, slots, layout: FileStore(folder / name, slots, layout)
        case "device":
            return lambda _, slots, layout: MemoryStore(slots, layout, device=device)
        case "host":
            pin = device.type == "cuda"
            return lambda _, slots, layout: MemoryStore(slots, layout, device=torch.device("cpu"), pin=pin)

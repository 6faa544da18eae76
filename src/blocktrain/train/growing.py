"""A run whose model grows: layers that are the identity still, because no visit has reached them, are left out.

    visit        0: block 0    1: block 1    2: block 0
    layers 0, 1  trained       frozen        trained
    layers 2, 3  left out      trained       frozen

Which layers those are follows from the schedule alone, so a resumed run goes on with the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext

from blocktrain.model.chain import Layer
from blocktrain.schedule import Visit
from blocktrain.train.job import Job


def left_out(job: Job, visit: Visit) -> tuple[Layer, ...]:
    """The layers that steps of `visit` need not run."""
    return next((layers for earlier, layers in _waiting(job) if earlier.index == visit.index), ())


def growing_visits(job: Job) -> Iterator[tuple[Visit, tuple[Layer, ...]]]:
    """The visits that leave layers out, each kind once. All is decided in the first sweep; in the second one each block
    is visited in the model as it then stays."""
    seen = set()
    for visit, layers in _waiting(job):
        if visit.sweep > 1:
            return
        if (visit.block.index, len(layers)) not in seen:
            seen.add((visit.block.index, len(layers)))
            yield visit, layers


def _waiting(job: Job) -> Iterator[tuple[Visit, tuple[Layer, ...]]]:
    """The run's visits, each with the layers that none has reached by then, for as long as there are any."""
    if job.growth is None or job.config.distributed.layout != "rows" or job.config.blocks.frozen_dropout:
        return  # stages and shards run all layers; layers with dropout draw masks, which others then would
    waiting = job.growth.layers
    for visit in job.schedule.visits(job.partition):
        moved = job.moved(visit.block)
        waiting = tuple(layer for layer in waiting if moved.isdisjoint(name for name, _ in layer.named_parameters()))
        if not waiting:
            return
        yield visit, waiting


def running_without(job: Job, layers: Collection[Layer]) -> AbstractContextManager[None]:
    """Inside, steps do without `layers`."""
    return nullcontext() if job.growth is None else job.growth.without(layers)

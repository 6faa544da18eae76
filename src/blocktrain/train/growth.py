"""A run whose model grows: layers that are the identity still, because no visit has reached them, are left out.

    visit        0: block 0    1: block 1    2: block 0
    layers 0, 1  trained       frozen        trained
    layers 2, 3  left out      trained       frozen

Which layers those are follows from the schedule alone, so a resumed run goes on with the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext

from blocktrain.chain.chain import Layer
from blocktrain.schedule import Visit
from blocktrain.train.context import TrainingContext


def left_out(context: TrainingContext, visit: Visit) -> tuple[Layer, ...]:
    """The layers that steps of `visit` need not run."""
    return _at(context, visit)[1] if _leaves_out(context) else ()


def growing_visits(context: TrainingContext) -> Iterator[tuple[Visit, tuple[Layer, ...]]]:
    """The visits that leave layers out, each kind once."""
    seen = set()
    for visit, _, waiting in _growing(context) if _leaves_out(context) else ():
        if waiting and (visit.block.index, len(waiting)) not in seen:
            seen.add((visit.block.index, len(waiting)))
            yield visit, waiting


def begin_layers(context: TrainingContext, visit: Visit) -> None:
    """Before `visit`, give the layers that it is the first to reach the weights of layers reached before, if they are
    to begin so."""
    if context.growth is None or context.config.model.grown_layers == "drawn":
        return
    reached, waiting = _at(context, visit)
    known = [layer for layer in context.growth.layers if layer not in (*reached, *waiting)]
    context.optimizer.copy_weights(context.growth.copies(reached, known))


def running_without(context: TrainingContext, layers: Collection[Layer]) -> AbstractContextManager[None]:
    """Inside, steps do without `layers`."""
    return nullcontext() if context.growth is None else context.growth.without(layers)


def _leaves_out(context: TrainingContext) -> bool:
    """Stages and shards run all layers; layers with dropout draw masks, which others then would."""
    return (
        context.growth is not None
        and context.config.distributed.layout == "data"
        and not context.config.blocks.frozen_dropout
    )


def _at(context: TrainingContext, visit: Visit) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """The layers that `visit` is the first to reach, and those that wait still."""
    waiting: tuple[Layer, ...] = ()
    for earlier, reached, waiting in _growing(context):
        if earlier.index == visit.index:
            return reached, waiting
    return (), waiting


def _growing(context: TrainingContext) -> Iterator[tuple[Visit, tuple[Layer, ...], tuple[Layer, ...]]]:
    """The visits that decide how the model grows, each with the layers that it is the first to reach, and those that
    wait still: until none waits, or two sweeps are over. Every sweep visits the same blocks; in the second one they are
    visited in the model as it then stays."""
    assert context.growth is not None
    waiting = context.growth.layers
    for visit in context.schedule.visits(context.partition):
        if not waiting or visit.sweep > 1:
            return
        moved = context.moved(visit.block)
        reached = tuple(
            layer for layer in waiting if not moved.isdisjoint(name for name, _ in layer.named_parameters())
        )
        waiting = tuple(layer for layer in waiting if layer not in reached)
        yield visit, reached, waiting

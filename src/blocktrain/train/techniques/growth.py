"""`model.zero_residuals`: a run whose model grows. Layers that no visit has reached yet are the identity, and left out.

    visit        0: block 0    1: block 1    2: block 0
    layers 0, 1  trained       frozen        trained
    layers 2, 3  left out      trained       frozen

Which layers those are follows from the schedule alone, so a resumed run leaves out the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from blocktrain.chain.chain import Layer
from blocktrain.records.run_records import Opening
from blocktrain.schedule import Visit
from blocktrain.train.context import TrainingContext
from blocktrain.train.technique import Technique


class Growth(Technique):
    """Leaves layers out until a visit reaches them, and initializes those that a visit reaches first."""

    def __init__(self, context: TrainingContext):
        self._context = context
        self._left_out: tuple[int, tuple[Layer, ...]] = (-1, ())  # of the visit with this index

    def before_visit(self, visit: Visit) -> None:
        """Copy weights of trained layers into the layers that this visit is the first to reach, if configured."""
        if self._context.growth is None or self._context.config.model.grown_layers == "drawn":
            return
        reached, waiting = _at(self._context, visit)
        known = [layer for layer in self._context.growth.layers if layer not in (*reached, *waiting)]
        self._context.optimizer.copy_weights(self._context.growth.copies(reached, known))

    def layers_left_out(self, visit: Visit) -> tuple[Layer, ...]:
        """See `Technique`."""
        if self._left_out[0] != visit.index:
            self._left_out = (visit.index, left_out(self._context, visit))
        return self._left_out[1]

    def around_step(self, visit: Visit) -> AbstractContextManager[object]:
        """See `Technique`."""
        return running_without(self._context, self.layers_left_out(visit))


def build(context: TrainingContext, opening: Opening, folder: Path) -> Growth | None:
    """None unless the model's layers begin as the identity."""
    return None if context.growth is None else Growth(context)


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


def running_without(context: TrainingContext, layers: Collection[Layer]) -> AbstractContextManager[None]:
    """Inside, steps do without `layers`."""
    return nullcontext() if context.growth is None else context.growth.without(layers)


def _leaves_out(context: TrainingContext) -> bool:
    """Pipelines and shards run all layers. Skipping a layer with dropout would shift the random numbers of the layers
    that follow."""
    return (
        context.growth is not None
        and context.config.distributed.layout == "data"
        and not context.config.blocks.frozen_dropout
    )


def _at(context: TrainingContext, visit: Visit) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """The layers that `visit` is the first to reach, and those that no visit has reached yet."""
    waiting: tuple[Layer, ...] = ()
    for earlier, reached, waiting in _growing(context):
        if earlier.index == visit.index:
            return reached, waiting
    return (), waiting


def _growing(context: TrainingContext) -> Iterator[tuple[Visit, tuple[Layer, ...], tuple[Layer, ...]]]:
    """The visits that decide how the model grows, each with the layers that it is the first to reach and those that
    still wait. They end when no layer waits, or after two sweeps: every sweep visits the same blocks, and from the
    second one on the model stays as it is."""
    assert context.growth is not None
    waiting = context.growth.layers
    for visit in context.schedule.visits(context.partition):
        if not waiting or visit.sweep > 1:
            return
        updated = context.updated_weights(visit.block)
        reached = tuple(
            layer for layer in waiting if not updated.isdisjoint(name for name, _ in layer.named_parameters())
        )
        waiting = tuple(layer for layer in waiting if layer not in reached)
        yield visit, reached, waiting

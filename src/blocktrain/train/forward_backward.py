"""The forward and backward passes of one optimizer step: over this rank's rows, or through a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Protocol

from torch import Tensor

from blocktrain.data.sampling import StepRows
from blocktrain.parallel.pipeline import Pipeline
from blocktrain.parallel.protocol import BatchParallel
from blocktrain.runtime import to_device
from blocktrain.train.context import TrainingContext
from blocktrain.train.technique import Batch, Techniques
from blocktrain.train.techniques.prefix_caching import PrefixCaching


class Passes(Protocol):
    """Leaves the gradients of a step, see `TrainModule.forward_backward`."""

    def forward_backward(self, rows: StepRows, following: StepRows) -> float:
        """This rank's share of the step's mean loss."""
        ...


def micro_batches(
    context: TrainingContext, parts: Iterable[StepRows], rows: StepRows
) -> Iterator[tuple[StepRows, Batch, float]]:
    """Each of `parts`, micro-batches of the step's `rows`: its rows, its batch on the device, and its weight.

    A micro-batch counts for as many predictions as it has, so that the parts of all ranks add up to one large batch.
    """
    data = context.data.train
    total = int(data.weights(rows.rows).sum())
    for part in parts:
        batch = to_device(data.batch(part.rows, variant=part.variant), context.device)
        yield part, batch, int(data.weights(part.rows).sum()) / total


class RankPasses:
    """This rank's part of the step's rows through the whole model, `micro_rows` at a time.

    While one micro-batch is computed, techniques prefetch what the next one needs.
    """

    def __init__(self, context: TrainingContext, parallel: BatchParallel, techniques: Techniques):
        self._context = context
        self._parallel = parallel
        self._techniques = techniques

    def forward_backward(self, rows: StepRows, following: StepRows) -> float:
        """See `Passes`."""
        context = self._context
        parts = context.rows.mine(rows).split(context.micro_rows)
        after = context.rows.mine(following).split(context.micro_rows)[0]
        loss = 0.0
        for (part, batch, weight), coming in zip(micro_batches(context, parts, rows), [*parts[1:], after], strict=True):
            with self._techniques.around_batch(part, batch):
                self._techniques.prefetch(coming)
                micro_loss = context.model(**batch).loss * weight
                with self._parallel.gradient_sync() if part is parts[-1] else nullcontext():
                    micro_loss.backward()
            loss += micro_loss.item()
        return loss


class PipelinePasses:
    """All of the step's rows through the layers of all ranks.

    Where the pipeline begins above a boundary, each rank first reads or computes the hidden states of its own
    micro-batches.
    """

    def __init__(self, context: TrainingContext, pipeline: Pipeline, prefix: PrefixCaching | None):
        self._context = context
        self._pipeline = pipeline
        self._prefix = prefix

    def forward_backward(self, rows: StepRows, following: StepRows) -> float:
        """See `Passes`; the loss is returned on rank 0, the others have no share of it."""
        context = self._context
        rank, size = context.ranks.rank, context.ranks.size
        parts, batches, weights = zip(
            *micro_batches(context, context.rows.in_turn(rows, context.micro_rows), rows), strict=True
        )
        hidden: list[Tensor | None] = [None] * len(parts)
        if self._prefix is not None and self._prefix.boundary:
            after = context.rows.mine(following).split(context.micro_rows)[0]
            for at in range(rank, len(parts), size):
                hidden[at] = self._prefix.states(parts[at], batches[at])
                self._prefix.prefetch(parts[at + size] if at + size < len(parts) else after)
        loss = self._pipeline.backward(batches, weights=weights, hidden=hidden)
        return loss if rank == 0 else 0.0

"""The forward and backward passes of one optimizer step: over this rank's rows, or through a pipeline."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Protocol

from torch import Tensor

from blocktrain.data.batch import to_device
from blocktrain.data.sampling import StepRows
from blocktrain.parallel.pipeline import Pipeline
from blocktrain.parallel.protocol import BatchParallel
from blocktrain.train.context import TrainingContext
from blocktrain.train.technique import Techniques
from blocktrain.train.techniques.prefix_caching import PrefixCaching


class Passes(Protocol):
    """Leaves the gradients of a step, see `TrainModule.forward_backward`."""

    def forward_backward(self, rows: StepRows, following: StepRows) -> float:
        """This rank's share of the step's mean loss."""
        ...


class RankPasses:
    """This rank's part of the step's rows through the whole model, `micro_rows` at a time.

    Each micro-batch counts for as many predictions as it has, so that the parts of all ranks add up to one large batch.
    While one is computed, techniques prefetch what the next one needs.
    """

    def __init__(self, context: TrainingContext, parallel: BatchParallel, techniques: Techniques):
        self._context = context
        self._parallel = parallel
        self._techniques = techniques

    def forward_backward(self, rows: StepRows, following: StepRows) -> float:
        """See `Passes`."""
        context, data = self._context, self._context.data.train
        parts = context.rows.mine(rows).split(context.micro_rows)
        weights = [int(data.weights(part.rows).sum()) for part in parts]
        total = int(data.weights(rows.rows).sum())
        loss = 0.0
        after = context.rows.mine(following).split(context.micro_rows)[0]
        for part, weight, coming in zip(parts, weights, [*parts[1:], after], strict=True):
            batch = to_device(data.batch(part.rows, variant=part.variant), context.device)
            with self._techniques.around_batch(part, batch):
                self._techniques.prefetch(coming)
                micro_loss = context.model(**batch).loss * (weight / total)
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
        context, data = self._context, self._context.data.train
        rank, size = context.ranks.rank, context.ranks.size
        parts = context.rows.in_turn(rows, context.micro_rows)
        weights = [int(data.weights(part.rows).sum()) for part in parts]
        batches = [to_device(data.batch(part.rows, variant=part.variant), context.device) for part in parts]
        hidden: list[Tensor | None] = [None] * len(parts)
        if self._prefix is not None and self._prefix.boundary:
            after = context.rows.mine(following).split(context.micro_rows)[0]
            for at in range(rank, len(parts), size):
                hidden[at] = self._prefix.states(parts[at], batches[at])
                self._prefix.prefetch(parts[at + size] if at + size < len(parts) else after)
        loss = self._pipeline.backward(batches, weights=[weight / sum(weights) for weight in weights], hidden=hidden)
        return loss if rank == 0 else 0.0

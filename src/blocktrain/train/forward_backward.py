"""The forward and backward passes of one optimizer step: over this rank's rows, or through a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

from torch import Tensor

from blocktrain.data.sampling import StepRows
from blocktrain.modules.unpacked_rows import known_rows
from blocktrain.parallel.pipeline import Pipeline
from blocktrain.parallel.protocol import BatchParallel
from blocktrain.runtime import to_device
from blocktrain.train.context import TrainingContext
from blocktrain.train.technique import Batch, Techniques
from blocktrain.train.techniques.prefix_caching import PrefixCaching


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


def rank_passes(
    context: TrainingContext, parallel: BatchParallel, techniques: Techniques, rows: StepRows, following: StepRows
) -> list[Tensor | float]:
    """This rank's part of the step's rows through the whole model, `micro_rows` at a time. Returns its shares of the
    loss, see `TrainModule.forward_backward`.

    While one micro-batch is computed, techniques prefetch what the next one needs.
    """
    parts = context.rows.mine(rows).split(context.micro_rows)
    after = context.rows.mine(following).split(context.micro_rows)[0]
    losses: list[Tensor | float] = []
    for (part, batch, weight), coming in zip(micro_batches(context, parts, rows), [*parts[1:], after], strict=True):
        with techniques.around_batch(part, batch):
            techniques.prefetch(coming)
            with known_rows(batch):
                micro_loss = context.model(**batch).loss * weight
            with parallel.gradient_sync() if part is parts[-1] else nullcontext():
                micro_loss.backward()
        losses.append(micro_loss.detach())
    return losses


def pipeline_passes(
    context: TrainingContext, pipeline: Pipeline, prefix: PrefixCaching | None, rows: StepRows, following: StepRows
) -> list[Tensor | float]:
    """All of the step's rows through the layers of all ranks. Returns the loss on rank 0; the others have no share.

    Where the pipeline begins above a boundary, each rank first reads or computes the hidden states of its own
    micro-batches.
    """
    rank, size = context.ranks.rank, context.ranks.size
    in_turn = context.rows.in_turn(rows, context.micro_rows)
    parts, batches, weights = zip(*micro_batches(context, in_turn, rows), strict=True)
    hidden: list[Tensor | None] = [None] * len(parts)
    if prefix is not None and prefix.boundary:
        after = context.rows.mine(following).split(context.micro_rows)[0]
        for at in range(rank, len(parts), size):
            hidden[at] = prefix.states(parts[at], batches[at])
            prefix.prefetch(parts[at + size] if at + size < len(parts) else after)
    loss = pipeline.backward(batches, weights=weights, hidden=hidden)
    return [loss] if rank == 0 else []

"""One optimizer step: forward and backward over its micro-batches, clip, update."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from blocktrain.data.batch import to_device
from blocktrain.data.sampling import StepRows
from blocktrain.errors import NonFiniteError
from blocktrain.parallel.data_parallel import ByRows
from blocktrain.parallel.pipeline import Pipeline
from blocktrain.runtime import seed_everything
from blocktrain.schedule import Visit
from blocktrain.train.context import TrainingContext
from blocktrain.train.prefix_runner import PrefixRunner


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step showed."""

    loss: float  # mean over the batch, nats per token or image
    grad_norm: float  # total 2-norm over the active block, before clipping; the ranks' mean where they step apart
    lr: float
    flops_saved: int  # by a prefix cache, on all ranks
    skipped: bool = False  # a non-finite step that changed nothing

    def to_event(self) -> dict[str, Any]:
        """As the fields of a step record."""
        return {"loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm, "skipped": self.skipped}


def train_step(
    context: TrainingContext,
    prefix: PrefixRunner,
    parallel: ByRows | Pipeline,
    visit: Visit,
    *,
    step: int,
    visit_step: int,
) -> StepResult:
    """Take 0-based `step`, the `visit_step`-th of `visit`; raises `NonFiniteError` unless that is to be skipped.

    Every rank returns, or raises, the same.
    """
    config, optimizer, ranks = context.config, context.optimizer, context.ranks
    factor = config.learning_rate.factor(step, total=context.total_steps, visit_step=visit_step)
    optimizer.scale_learning_rate(factor)
    seed_everything(config.seed, step, *([ranks.rank] if ranks.rank else []))  # rank 0 draws as a process alone
    buffers = _copied_buffers(context) if config.on_nonfinite == "skip" else {}
    rows, following = (
        context.rows.step(step=step + ahead, visit=visit.index, sweep=visit.sweep, visit_step=visit_step + ahead)
        for ahead in (0, 1)
    )
    if isinstance(parallel, Pipeline):
        mine = _through_stages(context, prefix, parallel, rows, following)
    else:
        mine = _accumulate(context, prefix, parallel, rows, following)
    mine_norm = parallel.clip_grad_norm(config.optimizer.max_grad_norm or math.inf)
    losses, norms, saved = zip(*ranks.all_gather([mine, mine_norm, prefix.newly_saved()]), strict=True)
    loss, norm = sum(losses), sum(norms) / ranks.size
    result = StepResult(loss=loss, grad_norm=norm, lr=config.optimizer.lr * factor, flops_saved=int(sum(saved)))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        optimizer.zero_grad()
        parallel.stepped(step)
        if config.on_nonfinite == "skip":
            for buffer, before in buffers.items():  # BatchNorm has already seen the batch
                buffer.copy_(before)
            return replace(result, skipped=True)
        what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {norm}"
        raise NonFiniteError(
            f"{what} at step {step + 1} in {optimizer.active}, batch of training rows {_listed(rows.rows)}; "
            "lower optimizer.lr, set optimizer.max_grad_norm, or on_nonfinite = 'skip'"
        )
    optimizer.step()
    optimizer.zero_grad()
    parallel.stepped(step)
    return result


def _accumulate(
    context: TrainingContext, prefix: PrefixRunner, parallel: ByRows, rows: StepRows, following: StepRows
) -> float:
    """Forward and backward over this rank's part of the step's rows, `micro_rows` at a time; returns what it adds to
    the mean loss over the step's predictions. Each part counts for as many as it has, so that the parts of all ranks
    add up to one large batch.

    While one part is computed, what the next one needs from a prefix cache is read: its rows, or the next step's.
    """
    parts = context.rows.mine(rows).split(context.micro_rows)
    weights = [int(context.task.train.weights(part.rows).sum()) for part in parts]
    total = int(context.task.train.weights(rows.rows).sum())
    loss = 0.0
    after = context.rows.mine(following).split(context.micro_rows)[0]
    for part, weight, coming in zip(parts, weights, [*parts[1:], after], strict=True):
        batch = to_device(context.task.train.batch(part.rows, variant=part.variant), context.device)
        with prefix.running(part, batch):
            prefix.prefetch(coming)
            micro_loss = context.model(**batch).loss * (weight / total)
            with parallel.last_backward() if part is parts[-1] else nullcontext():
                micro_loss.backward()
        loss += micro_loss.item()
    return loss


def _through_stages(
    context: TrainingContext, prefix: PrefixRunner, pipeline: Pipeline, rows: StepRows, following: StepRows
) -> float:
    """The same through a pipeline, which all of the step's rows pass: the mean loss, told on rank 0 alone.

    Where they start above a boundary, each rank reads or computes the hidden states of its own rows first.
    """
    rank, size = context.ranks.rank, context.ranks.size
    parts = context.rows.in_turn(rows, context.micro_rows)
    weights = [int(context.task.train.weights(part.rows).sum()) for part in parts]
    batches = [to_device(context.task.train.batch(part.rows, variant=part.variant), context.device) for part in parts]
    hidden: list[Tensor | None] = [None] * len(parts)
    if pipeline.config.start == "boundary" and prefix.level:
        after = context.rows.mine(following).split(context.micro_rows)[0]
        for at in range(rank, len(parts), size):
            hidden[at] = prefix.states(parts[at], batches[at])
            prefix.prefetch(parts[at + size] if at + size < len(parts) else after)
    loss = pipeline.backward(batches, weights=[weight / sum(weights) for weight in weights], hidden=hidden)
    return loss if context.ranks.is_rank0 else 0.0


def _copied_buffers(context: TrainingContext) -> dict[Tensor, Tensor]:
    """The active block's buffers, and copies of them."""
    block = context.optimizer.active
    modules = block.modules() if block is not None else ()
    return {buffer: buffer.clone() for module in modules for buffer in module.buffers()}


def _listed(rows: np.ndarray) -> str:
    shown = ", ".join(str(row) for row in rows[:8])
    return shown if len(rows) <= 8 else f"{shown}, ... ({len(rows)} in all)"

"""One optimizer step: forward and backward over its micro-batches, clip, update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from blocktrain.errors import NonFiniteError
from blocktrain.runtime import seed_everything
from blocktrain.train.job import Job
from blocktrain.train.task import to_device


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step showed."""

    loss: float  # mean over the batch, nats per token or image
    grad_norm: float  # total 2-norm over the active block, before clipping
    lr: float
    skipped: bool = False  # a non-finite step that changed nothing

    def to_event(self) -> dict[str, Any]:
        """As the fields of a step record."""
        return {"loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm, "skipped": self.skipped}


def train_step(job: Job, *, step: int, visit_step: int, rank: int, world_size: int) -> StepResult:
    """Take 0-based `step` on the active block. Raises `NonFiniteError` where the configuration says stop."""
    config, optimizer = job.config, job.optimizer
    factor = config.learning_rate.factor(step, total=job.total_steps, visit_step=visit_step)
    optimizer.scale_learning_rate(factor)
    seed_everything(config.seed, step, rank)
    first_row = step * config.batch.rows
    loss = _accumulate(job, first_row, rank=rank, world_size=world_size)
    norm = float(optimizer.clip_grad_norm(config.optimizer.max_grad_norm or math.inf))
    result = StepResult(loss=loss, grad_norm=norm, lr=config.optimizer.lr * factor)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        optimizer.zero_grad()
        if config.on_nonfinite == "skip":
            return StepResult(loss=loss, grad_norm=norm, lr=result.lr, skipped=True)
        what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {norm}"
        raise NonFiniteError(
            f"{what} at step {step + 1} in {optimizer.active}, batch of rows {first_row} to "
            f"{first_row + config.batch.rows - 1} of the data order; lower optimizer.lr, set optimizer.max_grad_norm, "
            "or on_nonfinite = 'skip'"
        )
    optimizer.step()
    optimizer.zero_grad()
    return result


def _accumulate(job: Job, first_row: int, *, rank: int, world_size: int) -> float:
    """Forward and backward over the step's rows, `micro_rows` at a time; returns the mean loss.

    Images are augmented anew each epoch: the variant is the epoch in which the step begins.
    """
    rows = job.config.batch.rows
    variant = job.order.epoch(first_row)
    micro = job.config.batch.micro_rows or rows
    loss = 0.0
    for start in range(first_row, first_row + rows, micro):
        indices = job.order.rows(start, start + micro)
        batch = to_device(job.task.train.batch(indices, variant=variant), job.device)
        share = micro / rows
        micro_loss = job.task.loss(job.model, batch) * share
        micro_loss.backward()
        loss += micro_loss.item()
    return loss

"""One optimizer step: forward and backward over its micro-batches, clip, update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from blocktrain.data.sampling import StepRows
from blocktrain.errors import NonFiniteError
from blocktrain.runtime import seed_everything
from blocktrain.schedule import Visit
from blocktrain.train.job import Job
from blocktrain.train.prefixed import PrefixedSteps
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


def train_step(job: Job, prefixed: PrefixedSteps, visit: Visit, *, step: int, visit_step: int) -> StepResult:
    """Take 0-based `step`, the `visit_step`-th of `visit`; raises `NonFiniteError` unless that is to be skipped."""
    config, optimizer = job.config, job.optimizer
    factor = config.learning_rate.factor(step, total=job.total_steps, visit_step=visit_step)
    optimizer.scale_learning_rate(factor)
    seed_everything(config.seed, step)
    buffers = _copied_buffers(job) if config.on_nonfinite == "skip" else {}
    rows, following = (
        job.rows.step(step=step + ahead, visit=visit.index, sweep=visit.sweep, visit_step=visit_step + ahead)
        for ahead in (0, 1)
    )
    loss = _accumulate(job, prefixed, rows, following)
    norm = float(optimizer.clip_grad_norm(config.optimizer.max_grad_norm or math.inf))
    result = StepResult(loss=loss, grad_norm=norm, lr=config.optimizer.lr * factor)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        optimizer.zero_grad()
        if config.on_nonfinite == "skip":
            for buffer, before in buffers.items():  # BatchNorm has already seen the batch
                buffer.copy_(before)
            return StepResult(loss=loss, grad_norm=norm, lr=result.lr, skipped=True)
        what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {norm}"
        raise NonFiniteError(
            f"{what} at step {step + 1} in {optimizer.active}, batch of training rows {_listed(rows.rows)}; "
            "lower optimizer.lr, set optimizer.max_grad_norm, or on_nonfinite = 'skip'"
        )
    optimizer.step()
    optimizer.zero_grad()
    return result


def _accumulate(job: Job, prefixed: PrefixedSteps, rows: StepRows, following: StepRows) -> float:
    """Forward and backward over the step's rows, `micro_rows` at a time; returns the mean loss, over predictions: each
    part counts for as many as it has, so that the parts add up to one large batch.

    While one part is computed, what the next one needs from a prefix cache is read: its rows, or the next step's.
    """
    parts = rows.split(job.micro_rows)
    weights = [int(job.task.train.weights(part.rows).sum()) for part in parts]
    loss = 0.0
    for part, weight, coming in zip(parts, weights, [*parts[1:], following.split(job.micro_rows)[0]], strict=True):
        batch = to_device(job.task.train.batch(part.rows, variant=part.variant), job.device)
        with prefixed.running(part, batch):
            prefixed.prefetch(coming)
            micro_loss = job.task.loss(job.model, batch) * (weight / sum(weights))
            micro_loss.backward()
        loss += micro_loss.item()
    return loss


def _copied_buffers(job: Job) -> dict[Tensor, Tensor]:
    """The active block's buffers, and copies of them."""
    block = job.optimizer.active
    modules = block.modules() if block is not None else ()
    return {buffer: buffer.clone() for module in modules for buffer in module.buffers()}


def _listed(rows: np.ndarray) -> str:
    shown = ", ".join(str(row) for row in rows[:8])
    return shown if len(rows) <= 8 else f"{shown}, ... ({len(rows)} in all)"

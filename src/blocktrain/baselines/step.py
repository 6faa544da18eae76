"""One step of a method that is not ours, on the rows and with the random numbers that full training would use."""

from __future__ import annotations

import math

from blocktrain.baselines.trainee import Trainee
from blocktrain.errors import NonFiniteError
from blocktrain.runtime import seed_everything
from blocktrain.train.job import Job
from blocktrain.train.step import StepResult
from blocktrain.train.task import to_device


def learning_rate_factor(job: Job, step: int) -> float:
    """Of 0-based `step`, as the configuration shapes it."""
    return job.config.learning_rate.factor(step, total=job.total_steps, visit_step=step)


def backward_pass(job: Job, trainee: Trainee, step: int) -> float:
    """Forward and backward over the step's rows, `micro_rows` at a time; returns the mean loss."""
    seed_everything(job.config.seed, step)
    trainee.begin(step)
    rows = job.rows.step(step=step, visit=0, sweep=0, visit_step=step)
    parts = rows.split(job.micro_rows)
    weights = [int(job.task.train.weights(part.rows).sum()) for part in parts]
    loss, factor = 0.0, learning_rate_factor(job, step)
    for part, weight in zip(parts, weights, strict=True):
        batch = to_device(job.task.train.batch(part.rows, variant=part.variant), job.device)
        share = job.task.loss(trainee.model, batch) * (weight / sum(weights))
        trainee.backward(share, factor)
        loss += share.item()
    return loss


def take_step(job: Job, trainee: Trainee, step: int) -> StepResult:
    """Take 0-based `step`; raises `NonFiniteError` where loss or gradients are not finite."""
    loss = backward_pass(job, trainee, step)
    norm = trainee.clip(job.config.optimizer.max_grad_norm or math.inf)
    factor = learning_rate_factor(job, step)
    if not math.isfinite(loss) or math.isinf(norm):  # nan: the gradients are used up
        raise NonFiniteError(f"loss is {loss} and gradient norm {norm} at step {step + 1}; lower optimizer.lr")
    trainee.update(factor)
    lr = job.config.optimizer.lr * factor
    return StepResult(loss=loss, grad_norm=norm, lr=lr, flops_saved=0)

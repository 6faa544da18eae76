"""One step of a method that is not ours, on the rows and with the random numbers that full training would use."""

from __future__ import annotations

import math

from blocktrain.compare.trainee import Trainee
from blocktrain.data.batch import to_device
from blocktrain.errors import NonFiniteError
from blocktrain.runtime import seed_everything
from blocktrain.train.context import TrainingContext
from blocktrain.train.step import StepResult


def learning_rate_factor(context: TrainingContext, step: int) -> float:
    """Of 0-based `step`, as the configuration shapes it."""
    return context.config.learning_rate.factor(step, total=context.total_steps, visit_step=step)


def backward_pass(context: TrainingContext, trainee: Trainee, step: int) -> float:
    """Forward and backward over the step's rows, `micro_rows` at a time; returns the mean loss."""
    seed_everything(context.config.seed, step)
    trainee.begin(step)
    rows = context.rows.step(step=step, visit=0, sweep=0, visit_step=step)
    parts = rows.split(context.micro_rows)
    weights = [int(context.task.train.weights(part.rows).sum()) for part in parts]
    loss, factor = 0.0, learning_rate_factor(context, step)
    for part, weight in zip(parts, weights, strict=True):
        batch = to_device(context.task.train.batch(part.rows, variant=part.variant), context.device)
        share = trainee.model(**batch).loss * (weight / sum(weights))
        trainee.backward(share, factor)
        loss += share.item()
    return loss


def take_step(context: TrainingContext, trainee: Trainee, step: int) -> StepResult:
    """Take 0-based `step`; raises `NonFiniteError` where loss or gradients are not finite."""
    loss = backward_pass(context, trainee, step)
    norm = trainee.clip(context.config.optimizer.max_grad_norm or math.inf)
    factor = learning_rate_factor(context, step)
    if not math.isfinite(loss) or math.isinf(norm):  # nan: the gradients are used up
        raise NonFiniteError(f"loss is {loss} and gradient norm {norm} at step {step + 1}; lower optimizer.lr")
    trainee.update(factor)
    lr = context.config.optimizer.lr * factor
    return StepResult(loss=loss, grad_norm=norm, lr=lr, flops_saved=0)

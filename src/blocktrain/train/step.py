"""One optimizer step, the same for every train module: rate, rows, gradients, clip, update or skip."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from blocktrain.errors import NonFiniteError
from blocktrain.runtime import read_numbers, seed_everything
from blocktrain.schedule import Visit
from blocktrain.train.context import TrainingContext
from blocktrain.train.technique import Techniques
from blocktrain.train.train_module import TrainModule


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step showed; the same on every rank."""

    loss: float  # mean over the batch, nats per token or image
    grad_norm: float  # total 2-norm before clipping, the ranks' mean; nan where the backward pass used the gradients up
    lr: float
    flops_saved: int = 0  # by techniques, on all ranks
    skipped: bool = False  # a non-finite step that changed nothing


def take_step(
    context: TrainingContext,
    module: TrainModule,
    techniques: Techniques,
    visit: Visit,
    *,
    step: int,
    visit_step: int,
) -> StepResult:
    """Take 0-based `step`, the `visit_step`-th of `visit`. All ranks return the same result or raise the same error.

    What is drawn at random in it follows from the seed, the step and the rank. Raises `NonFiniteError` where the loss
    or the gradient norm is not finite, unless such steps are to be skipped.
    """
    config, ranks = context.config, context.ranks
    lr_factor = config.learning_rate.factor(step, total=context.total_steps, visit_step=visit_step)
    seed_everything(config.seed, step, *([ranks.rank] if ranks.rank else []))  # rank 0 draws as a single process does
    module.begin_step(step, lr_factor)
    buffers = {buffer: buffer.clone() for buffer in module.trained_buffers()} if config.on_nonfinite == "skip" else {}
    rows, following = (
        context.rows.step(step=step + ahead, visit=visit.index, sweep=visit.sweep, visit_step=visit_step + ahead)
        for ahead in (0, 1)
    )
    loss_shares = module.forward_backward(rows, following)
    norm = module.clip_grad_norm(config.optimizer.max_grad_norm or math.inf)
    own_norm, *own_losses = read_numbers([0.0 if norm is None else norm, *loss_shares])
    shares = ranks.all_gather([sum(own_losses), own_norm, techniques.flops_saved()])
    losses, norms, saved = zip(*shares, strict=True)
    loss, mean_norm = sum(losses), sum(norms) / ranks.size
    result = StepResult(
        loss=loss,
        grad_norm=math.nan if norm is None else mean_norm,
        lr=config.optimizer.lr * lr_factor,
        flops_saved=int(sum(saved)),
    )
    if math.isfinite(loss) and math.isfinite(mean_norm):
        module.update(step)
        return result
    module.discard(step)
    if config.on_nonfinite == "skip" and norm is not None:
        for buffer, before in buffers.items():  # BatchNorm has already seen the batch
            buffer.copy_(before)
        return replace(result, skipped=True)
    what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {mean_norm}"
    listed = ", ".join(str(row) for row in rows.rows[:8])
    if len(rows.rows) > 8:
        listed = f"{listed}, ... ({len(rows.rows)} in all)"
    raise NonFiniteError(
        f"{what} at step {step + 1} in {visit.block}, batch of training rows {listed}; "
        "lower optimizer.lr, set optimizer.max_grad_norm, or on_nonfinite = 'skip'"
    )

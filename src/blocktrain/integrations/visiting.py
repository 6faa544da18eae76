"""A block optimizer for loops that know one optimizer and call `step()`: it goes from visit to visit by itself.

    loop      backward      step              backward      step           backward
    here                    move the block,                 move it,
                            free gradients                  the visit is over: activate the next block

The loop owns the number of steps, the accumulation of gradients, evaluation, and the learning rate: a scheduler of
PyTorch's sets the rate of the one group here, and each step scales the block's own rates by it. Visits are counted in
calls of `step`, so in optimizer steps whatever the loop accumulates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from blocktrain.chain.freezing import set_train_modes
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.schedule import Cyclic, Visit
from blocktrain.units import BatchGeometry

_KEYS = {"visit", "visit_step", "param_groups", "blocks"}
_STEPS_ALONE = BatchGeometry(tokens_per_step=1, rows_per_step=1, rows_per_epoch=1)


class VisitingOptimizer(torch.optim.Optimizer):
    """`blocks` visiting its partition's blocks as `schedule` says, without end: the loop around it ends.

    schedule: its visits in steps; no `sweeps`.

    `param_groups` is one group: its `params` are what is trained now (with `BF16_EXACT` the masters), its `lr` the rate
    of the optimizer class, for schedulers. `state` is empty: the block optimizer holds it. Raises `ConfigError` for a
    schedule that it cannot follow.
    """

    def __init__(self, blocks: BlockOptimizer, schedule: Cyclic):
        unknown = next((length for length in (*schedule.first_visits, schedule.visit) if length.unit != "steps"), None)
        if unknown is not None:
            raise ConfigError(
                f"visits of {unknown}: this loop's tokens and epochs are not known here; give the visit in steps"
            )
        moving = f"tail = '{blocks.tail.rule}'" if blocks.tail is not None else "in_backward = true"
        if blocks.tail is not None or blocks.in_backward:
            raise ConfigError(
                f"{moving} moves weights in each backward pass: a loop that may accumulate gradients and sets the "
                "rate afterwards cannot have that; leave it out, or use blocktrain train"
            )
        if schedule.sweeps is not None:
            raise ConfigError(f"sweeps = {schedule.sweeps}: the loop around this optimizer ends the run; leave it out")
        self.blocks = blocks
        self.schedule = schedule
        self.visit: Visit = self._visit_of(0)
        self.visit_step = 0
        self._leave = ExitStack()
        self._leave.enter_context(blocks.visit(self.visit.block))
        super().__init__(self._trained(), {"lr": blocks.param_groups[0]["lr"]})

    # -- the loop's side ------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step on the active block, then free its gradients (`model.zero_grad()` knows nothing of masters), then,
        where the visit is over, the next block is activated."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.blocks.scale_learning_rate(self.param_groups[0]["lr"] / self.defaults["lr"])
        self.blocks.step()
        self.blocks.zero_grad()
        self.visit_step += 1
        if self.visit_step >= self.visit.duration.in_steps(_STEPS_ALONE):
            self._enter(self.visit.index + 1)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the active block's gradients, its masters' too."""
        self.blocks.zero_grad()

    def train(self) -> None:
        """Call it after `model.train()`: frozen layers go back to eval mode. The Hugging Face Trainer calls it by
        itself, as it does for schedule-free optimizers."""
        set_train_modes(self.blocks.partition, self.visit.block, frozen_dropout=self.blocks.frozen_dropout)

    def clip_grad_norm(self, max_norm: float = float("inf")) -> Tensor:
        """As `BlockOptimizer.clip_grad_norm`."""
        return self.blocks.clip_grad_norm(max_norm)

    def close(self) -> None:
        """Leave the visit under way: masters and moments are gone from the device, everything is frozen."""
        self._leave.close()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where it is, and everything beyond the model's weights: plain values and tensors, for `torch.save`."""
        group = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        return {
            "visit": self.visit.index,
            "visit_step": self.visit_step,
            "param_groups": [group],
            "blocks": self.blocks.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Go on where `state_dict` was taken; the model's weights must be those of that moment already."""
        if not state_dict.keys() >= _KEYS:
            raise CheckpointError(
                f"the saved optimizer has {sorted(state_dict)}, not {sorted(_KEYS)}: it was not saved by blocktrain; "
                "start anew, or resume with the optimizer it was saved with"
            )
        saved = state_dict["blocks"]
        on_host = {
            index: {name: remainder.cpu() for name, remainder in mine.items()}
            for index, mine in saved["low_bits"].items()
        }
        self._leave.close()
        self.blocks.load_state_dict({**saved, "low_bits": on_host})
        self.param_groups[0].update(state_dict["param_groups"][0])
        self._enter(state_dict["visit"], step=state_dict["visit_step"])

    def take_weights(self) -> None:
        """The model's weights were replaced by others, in mid-visit too: masters start anew from them, so that no later
        step brings the old ones back. Moments stay."""
        saved = self.state_dict()
        low_bits = {
            index: {name: torch.zeros_like(remainder) for name, remainder in mine.items()}
            for index, mine in saved["blocks"]["low_bits"].items()
        }
        self.load_state_dict({**saved, "blocks": {**saved["blocks"], "low_bits": low_bits}})

    # -- visits ---------------------------------------------------------------------------------------------------

    def _enter(self, index: int, *, step: int = 0) -> None:
        """Leave the visit under way and begin, or go on with, the `index`-th."""
        self._leave.close()
        self.visit, self.visit_step = self._visit_of(index), step
        self._leave.enter_context(self.blocks.visit(self.visit.block))
        self.param_groups[0]["params"] = self._trained()

    def _visit_of(self, index: int) -> Visit:
        return next(self.schedule.visits(self.blocks.partition, start=index))

    def _trained(self) -> list[Tensor]:
        return [parameter for group in self.blocks.param_groups for parameter in group["params"]]

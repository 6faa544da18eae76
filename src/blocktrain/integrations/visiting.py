"""A block optimizer for training loops that know a single optimizer and only call `step()`: it moves from visit to
visit by itself.

    loop      backward      step              backward      step                    backward
    here                    move the block,                 move the block,
                            free gradients                  the visit is over:
                                                            activate the next block

The loop owns the number of steps, gradient accumulation, evaluation and the learning rate: a PyTorch scheduler sets
the rate of the one parameter group here, and each step scales the block's own rates accordingly. Visits are counted in
calls of `step`, that is in optimizer steps, however many micro-batches the loop accumulates. With several processes,
each on its own rows, only the gradients of the active block are all-reduced (`gradient_sync`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from blocktrain.chain.freezing import set_train_modes
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.parallel.config import DistributedConfig
from blocktrain.parallel.data_parallel import GradientAllReduce
from blocktrain.parallel.ranks import Ranks
from blocktrain.parallel.replicas import assert_replicas_equal, average_over_ranks, batch_norm_statistics
from blocktrain.schedule import Cyclic, Visit
from blocktrain.units import BatchGeometry

log = logging.getLogger(__name__)

_KEYS = {"visit", "visit_step", "param_groups", "blocks"}
_STEPS_ALONE = BatchGeometry(tokens_per_step=1, rows_per_step=1, rows_per_epoch=1)


class VisitingOptimizer(torch.optim.Optimizer):
    """Visits the blocks of `blocks`, a block optimizer, in the order of `schedule`; only the loop around it ends.

    schedule: its visits are given in steps, and it has no `sweeps`.
    ranks: the processes that train together. They start with equal weights and take the same steps, each after backward
        passes over its own rows, of which the last one of a step runs inside of `gradient_sync`.

    There is one parameter group. Its `params` are what is trained now (with `BF16_EXACT` the masters), and its `lr` is
    the optimizer class's rate, for schedulers to set. `state` is empty, because the block optimizer holds the moments.
    Raises `ConfigError` for a schedule that it cannot follow.
    """

    def __init__(self, blocks: BlockOptimizer, schedule: Cyclic, *, ranks: Ranks | None = None):
        unknown = next((length for length in (*schedule.first_visits, schedule.visit) if length.unit != "steps"), None)
        if unknown is not None:
            raise ConfigError(
                f"visits of {unknown}: how many tokens or rows a step of the loop has is not known here; "
                "give the visit in steps"
            )
        for update in blocks.backward_updates:
            raise ConfigError(
                f"{update.setting} updates weights in each backward pass: a loop that may accumulate gradients and "
                "sets the rate afterwards cannot have that; leave it out, or use blocktrain train"
            )
        if schedule.sweeps is not None:
            raise ConfigError(f"sweeps = {schedule.sweeps}: the loop around this optimizer ends the run; leave it out")
        self.blocks = blocks
        self.schedule = schedule
        self.ranks = ranks if ranks is not None else Ranks()
        self._visit_stack = ExitStack()  # leaves the current visit
        self._enter_visit(0)
        super().__init__(self._trained_parameters(), {"lr": blocks.param_groups[0]["lr"]})

    # -- the loop's side ------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes one step on the active block and frees its gradients (`model.zero_grad()` would miss those of masters).
        Where the visit is over, it then activates the next block; raises `PeerError` if ranks have other weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.blocks.scale_learning_rate(self.param_groups[0]["lr"] / self.defaults["lr"])
        self.blocks.step()
        self.blocks.zero_grad()
        self.visit_step += 1
        if self.visit_step >= self.visit.duration.in_steps(_STEPS_ALONE):
            assert_replicas_equal(self.ranks, self.visit.block, self.blocks.active_block.trained)
            self._begin_visit(self.visit.index + 1)
        return loss

    @contextmanager
    def gradient_sync(self) -> Iterator[None]:
        """Wraps the last backward pass of a step. Gradients are all-reduced as it completes them; at the end they are
        means over the ranks, as DistributedDataParallel's are. Collective; one process alone does nothing here."""
        with self._all_reduce.running():
            yield
        for gradient in self.blocks.gradients() if self.ranks.size > 1 else ():
            gradient.div_(self.ranks.size)
        average_over_ranks(self.ranks, batch_norm_statistics(self.visit.block))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees the gradients of the active block and of its masters."""
        self.blocks.zero_grad()

    def train(self) -> None:
        """Puts frozen layers back into eval mode: call it after `model.train()`. The Hugging Face Trainer does so by
        itself, as for schedule-free optimizers."""
        partition = self.blocks.partition
        set_train_modes(partition, self.visit.block, frozen_dropout=self.blocks.frozen_dropout)
        partition.model.training = True  # TRL asks the model whether it is being trained, and else treats rows as eval

    def clip_grad_norm(self, max_norm: float = float("inf")) -> Tensor:
        """See `BlockOptimizer.clip_grad_norm`."""
        return self.blocks.clip_grad_norm(max_norm)

    def pause(self) -> None:
        """Leaves the current visit so that `resume` continues it exactly. Until then no step can be taken, everything
        is frozen, and the block's moments are on the host."""
        block = self.blocks.block
        if block is None:
            return
        at = {index: (self.blocks.block_state(index), self.blocks.block_low_bits(index)) for index in block.members}
        self._visit_stack.close()
        self.blocks.load_progress(at)
        self.param_groups[0]["params"] = []  # masters are freed

    def resume(self) -> None:
        """Continues the visit that `pause` left."""
        if self.blocks.block is None:
            self._begin_visit(self.visit.index, step=self.visit_step)

    def close(self) -> None:
        """Leaves the current visit: masters and moments are gone from the device, and everything is frozen."""
        self._visit_stack.close()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position in the schedule and all state beside the model's weights: plain values and tensors, for
        `torch.save`."""
        group = {key: value for key, value in self.param_groups[0].items() if key != "params"}
        return {
            "visit": self.visit.index,
            "visit_step": self.visit_step,
            "schedule": self._schedule_in_words(),
            "param_groups": [group],
            "blocks": self.blocks.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Continues where `state_dict` was taken; the model must already have the weights of that moment. Raises
        `CheckpointError` for the state of another optimizer."""
        if not state_dict.keys() >= _KEYS:
            raise CheckpointError(
                f"the saved optimizer has {sorted(state_dict)}, not {sorted(_KEYS)}: it was not saved by blocktrain; "
                "start a new run, or resume with the optimizer that it was saved with"
            )
        saved = state_dict["blocks"]
        on_host = {
            index: {name: bits.cpu() for name, bits in mine.items()} for index, mine in saved["low_bits"].items()
        }
        before, now = state_dict.get("schedule"), self._schedule_in_words()
        if before is not None and before != now:  # older checkpoints do not say
            log.warning(
                "the checkpoint was written under other visits (%s), and the run now continues in the midst of visit "
                "%d of these: %s. For the same visits resume with the same run length, or give the visit in steps",
                before,
                state_dict["visit"],
                now,
            )
        self._visit_stack.close()
        self.blocks.load_state_dict({**saved, "low_bits": on_host})
        self.param_groups[0].update(state_dict["param_groups"][0])
        self._begin_visit(state_dict["visit"], step=state_dict["visit_step"])

    def restart_masters(self) -> None:
        """Makes masters restart from the model's weights; moments stay. Call it after the weights were replaced, also
        in mid-visit, so that no later step restores the old weights from their masters."""
        saved = self.state_dict()
        low_bits = {
            index: {name: torch.zeros_like(bits) for name, bits in mine.items()}
            for index, mine in saved["blocks"]["low_bits"].items()
        }
        self.load_state_dict({**saved, "blocks": {**saved["blocks"], "low_bits": low_bits}})

    # -- visits ---------------------------------------------------------------------------------------------------

    def _begin_visit(self, index: int, *, step: int = 0) -> None:
        """Leaves the current visit and enters the `index`-th one, of which `step` steps have been taken."""
        self._visit_stack.close()
        self._enter_visit(index, step=step)
        self.param_groups[0]["params"] = self._trained_parameters()
        self.train()

    def _enter_visit(self, index: int, *, step: int = 0) -> None:
        self.visit, self.visit_step = self._visit_of(index), step
        self._visit_stack.enter_context(self.blocks.visit(self.visit.block))
        self._all_reduce = GradientAllReduce(self.ranks, self.blocks.active_block, DistributedConfig())
        self._visit_stack.callback(self._all_reduce.close)

    def _schedule_in_words(self) -> str:
        """What decides the visits, in words: for checkpoints and for messages."""
        cyclic = self.schedule
        order = cyclic.order if isinstance(cyclic.order, str) else list(cyclic.order)
        first = [int(length.value) for length in cyclic.first_visits]
        longer = f", the first {len(first)} of {first[0]} to {max(first)} steps" if first else ""
        return f"visits of {cyclic.visit.value:g} steps{longer}, order {order}, span {cyclic.span}"

    def _visit_of(self, index: int) -> Visit:
        return next(self.schedule.visits(self.blocks.partition, start=index))

    def _trained_parameters(self) -> list[Tensor]:
        return [parameter for group in self.blocks.param_groups for parameter in group["params"]]

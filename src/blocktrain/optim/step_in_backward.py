"""Updates inside a visit's backward pass: a weight is updated as soon as its gradient is complete.

    backward     prefix     active block                               tail
                            <- `StepInBackward`: its own weights       <- contrib/learning_tail.py: weights above it
                            a gradient is complete, its weight         then
                            is stepped, the gradient is freed          optimizer.step() counts the step

All gradients of a block together take as much memory as its weights; one at a time, they take as much as the largest
matrix (the fused update of LOMO, Lv et al. 2023; `optimizer_in_bwd` in torchtune). A weight may be updated at that
moment, because nothing that is still to be differentiated uses it. Each weight is updated by its own gradient and
state, so the result is the same bit for bit. The price: a step is one backward pass, its learning rate is set before
it, gradients of micro-batches or of several processes cannot be summed first, and gradients cannot be clipped, because
their total norm is known only when all weights are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from blocktrain.chain.block import Block, Partition
from blocktrain.errors import ConfigError
from blocktrain.optim.active_block import ActiveBlock
from blocktrain.optim.factory import steps_parameters_independently
from blocktrain.optim.precision import Precision
from blocktrain.optim.weight_store import WeightLocation


class BackwardUpdate(Protocol):
    """Updates weights inside the backward passes of every visit. `BlockOptimizer(tail=...)` takes one."""

    @property
    def setting(self) -> str:
        """How a user has asked for it, as error messages quote it: "tail = 'sgd'"."""
        ...

    def require(self, partition: Partition, precision: Precision, frozen: WeightLocation) -> None:
        """Raise `ConfigError` if these weights cannot be updated in a backward pass."""
        ...

    def also_updates(self, partition: Partition, block: Block) -> dict[str, nn.Parameter]:
        """The parameters, by name, that it updates in a visit to `block` beyond the block's own."""
        ...

    def updating(self, partition: Partition, active: ActiveBlock) -> AbstractContextManager[None]:
        """Inside, every backward pass updates weights. There must be exactly one backward pass a step.

        It is entered when `active` is activated and exited before it retires.
        """
        ...


def require_single_process(setting: str) -> None:
    """Raise `ConfigError` if there are several processes, whose gradients must be summed before weights move."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_distributed and torch.distributed.get_world_size() > 1:
        raise ConfigError(
            f"{setting} updates weights inside the backward pass, before gradients of several processes are summed: "
            "use one process"
        )


class StepInBackward:
    """The `BackwardUpdate` that steps the active block's own weights."""

    setting = "in_backward = true"

    def require(self, partition: Partition, precision: Precision, frozen: WeightLocation) -> None:
        """Raise `ConfigError` if there are several processes."""
        require_single_process(self.setting)

    def also_updates(self, partition: Partition, block: Block) -> dict[str, nn.Parameter]:
        """Nothing beyond the block's own parameters."""
        return {}

    @contextmanager
    def updating(self, partition: Partition, active: ActiveBlock) -> Iterator[None]:
        """Inside, every backward pass is a step of `active`'s optimizers."""
        steps: dict[str, Callable[[Tensor], None]] = {}
        for optimizer in active.optimizers:
            if not steps_parameters_independently(optimizer):
                raise ConfigError(
                    f"{self.setting} steps weights one by one, and {type(optimizer).__name__} may not be meant for "
                    "that; leave it out"
                )
            steps |= {name: partial(_step, active, optimizer, name) for name in active.parameters_of(optimizer)}
        active.stepped_norms = []
        # These hooks run after those that pass gradients to masters, which were registered first.
        weights = active.block.parameters.items()
        hooks = [weight.register_post_accumulate_grad_hook(steps[name]) for name, weight in weights]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _step(active: ActiveBlock, optimizer: torch.optim.Optimizer, name: str, _weight: Tensor) -> None:
    gradient = active.gradient(name)
    if gradient is not None and active.stepped_norms is not None:
        active.stepped_norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))
        active.step_with(optimizer, [name])
        active.put_gradient(name, None)

"""The active block's weights are stepped inside the backward pass, each as soon as its gradient is complete.

    backward     prefix     active block                            then
                            a gradient is complete, its weight      optimizer.step()
                            is stepped, the gradient is freed       counts the step

All gradients of a block together take as much memory as its weights; one at a time, they take as much as the largest
matrix (the fused update of LOMO, Lv et al. 2023; `optimizer_in_bwd` in torchtune). A weight may be moved at that
moment, because nothing that is still to be differentiated uses it. Each weight moves by its own gradient and state, so
the result is the same bit for bit. The price: a step is one backward pass, its learning rate is set before it, and
gradients cannot be clipped, because their total norm is known only when all weights have moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from blocktrain.chain.block import Block, Partition
from blocktrain.errors import ConfigError
from blocktrain.optim.active_block import ActiveBlock
from blocktrain.optim.backward_update_protocol import require_single_process
from blocktrain.optim.factory import steps_parameters_independently
from blocktrain.optim.offloaded_weights import FrozenPlace
from blocktrain.optim.precision import Precision


class StepInBackward:
    """The `BackwardUpdate` that steps the active block's own weights."""

    setting = "in_backward = true"

    def require(self, partition: Partition, precision: Precision, frozen: FrozenPlace) -> None:
        """Raise `ConfigError` if there are several processes."""
        require_single_process(self.setting)

    def also_moves(self, partition: Partition, block: Block) -> dict[str, nn.Parameter]:
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
            steps |= {name: partial(_step, active, optimizer, name) for name in active.moved_by(optimizer)}
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

"""The active block's weights are stepped inside the backward pass, each as soon as its gradient is whole.

    backward     prefix     active block                            then
                            one gradient comes, its weight is       optimizer.step()
                            stepped, the gradient is gone           counts

Gradients of a whole block at once take as much memory as its weights; so, one at a time, does the largest matrix alone
(the fused update of LOMO, Lv et al. 2023; `optimizer_in_bwd` in torchtune). A weight may be moved then: nothing that is
still to be differentiated uses it. Each weight moves by its own gradient and state, so that what is learned is the same
bit for bit. The price: a step is one backward pass, its rate is set before it, and nothing can be clipped, since the
total norm is known when all weights have moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from blocktrain.errors import ConfigError
from blocktrain.optim.active_block import Active
from blocktrain.optim.factory import steps_parameters_independently

REASON = "in_backward = true steps weights inside the backward pass"


def require_single_process(said: str) -> None:
    """Raise `ConfigError` where there are several processes, whose gradients are summed before they move anything."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if several and torch.distributed.get_world_size() > 1:
        raise ConfigError(f"{said}, before gradients of several processes are summed: use one process")


@contextmanager
def stepping(active: Active) -> Iterator[None]:
    """Inside, every backward pass is a step of `active`'s optimizers; there must be one a step."""
    steps: dict[str, Callable[[Tensor], None]] = {}
    for optimizer in active.optimizers:
        if not steps_parameters_independently(optimizer):
            raise ConfigError(
                f"{REASON}, one by one: {type(optimizer).__name__} may not be meant for that; leave it out"
            )
        steps |= {name: partial(_step, active, optimizer, name) for name in active.moved_by(optimizer)}
    active.used = []
    # After the hooks that bring gradients to masters: those were there first.
    weights = active.block.parameters.items()
    hooks = [weight.register_post_accumulate_grad_hook(steps[name]) for name, weight in weights]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _step(active: Active, optimizer: torch.optim.Optimizer, name: str, _weight: Tensor) -> None:
    gradient = active.gradient(name)
    if gradient is not None and active.used is not None:
        active.used.append(torch.linalg.vector_norm(gradient, dtype=torch.float32))
        active.step_with(optimizer, [name])
        active.put_gradient(name, None)

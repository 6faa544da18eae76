"""A tail that learns without memory: the weights above the active block are updated inside the backward pass.

    backward     prefix     active block           tail
                            gradients are kept  <- a gradient is complete, its weight is updated, the gradient is freed

The activation gradients of the tail are computed anyway. Its weight gradients cost a third of a full step there, and no
memory except the inputs of its layers: there are no moments, no master, and no gradient that outlives its weight's turn
(the fused update of LOMO, Lv et al. 2023). A weight may be updated as soon as its gradient is complete, because nothing
that is still to be differentiated uses it.

    sgd              W -= rate * G / rms(G)                                     every weight
    newton-schulz    W -= 2 rate * O / rms(O), O the nearest orthogonal to G    hidden matrices; the others as above
                     (Muon without its momentum, Jordan et al. 2024)

`rate` is `Tail.share` times the learning rate of the active block's first group at that moment. It is the root mean
square of an update, comparable with the learning rate of AdamW, whose updates have a root mean square near one. There
is no weight decay, and clipping and gradient norms see only the active block. In all other ways the tail stays frozen:
it is in eval mode, so its dropout does nothing and its BatchNorm statistics do not move.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import _muon
from torch.utils.hooks import RemovableHandle

from blocktrain.chain.block import Block, Partition
from blocktrain.errors import ConfigError, nearest
from blocktrain.optim.active_block import ActiveBlock
from blocktrain.optim.factory import hidden_matrices
from blocktrain.optim.precision import Precision
from blocktrain.optim.step_in_backward import require_single_process
from blocktrain.optim.weight_store import OnDevice, WeightLocation

Rule = Literal["sgd", "newton-schulz"]

ORTHOGONAL = 2.0  # scale of an orthogonal update relative to plain SGD: the best shares found were 0.2 and 0.1
_TINY = 1e-30  # the least root mean square to divide by, for a gradient that is zero


@dataclass(frozen=True, kw_only=True)
class Tail:
    """How the layers above the active block are updated; a `BackwardUpdate` (see `optim/step_in_backward.py`).

    rule: "sgd", or "newton-schulz" (hidden matrices are orthogonalized). share: the share of the learning rate that a
    weight moves by.
    """

    rule: Rule
    share: float = 0.1

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ConfigError(f"tail '{self.rule}' is unknown; {nearest(self.rule, get_args(Rule))}")
        if not 0 < self.share < math.inf:
            raise ConfigError(f"tail_share must be positive, not {self.share:g}")

    @property
    def setting(self) -> str:
        """The setting, as error messages quote it."""
        return f"tail = '{self.rule}'"

    def require(self, partition: Partition, precision: Precision, frozen: WeightLocation) -> None:
        """Raise `ConfigError` unless all frozen weights are whole, in fp32, on the device of one process."""
        reason = f"{self.setting} updates frozen weights inside the backward pass"
        if precision.has_master:
            raise ConfigError(
                f"{reason}, and frozen weights of precision '{precision.name}' have no master: set precision = 'fp32'"
            )
        if not isinstance(frozen, OnDevice):
            raise ConfigError(f"{reason}, and memory.frozen = 'host' offloads them: set memory.frozen = 'device'")
        for block in partition:
            if block.rows:
                name = next(iter(block.rows))
                raise ConfigError(f"{reason}, whole; {block} has rows of '{name}' only: use larger blocks")
        require_single_process(self.setting)

    def also_updates(self, partition: Partition, block: Block) -> dict[str, nn.Parameter]:
        """Every parameter of the blocks above `block`."""
        return partition.parameters_above(block)

    @contextmanager
    def updating(self, partition: Partition, active: ActiveBlock) -> Iterator[None]:
        """Inside, every backward pass updates the tail; there must be exactly one a step."""
        matrices = hidden_matrices(partition) if self.rule == "newton-schulz" else set()

        @torch.no_grad()
        def move(weight: Tensor, *, is_matrix: bool) -> None:
            gradient, weight.grad = weight.grad, None
            if gradient is None:
                return
            if is_matrix:  # orthogonal (m, n): min(m, n) singular values of 1, so its rms is 1 / sqrt(max(m, n))
                update = orthogonalize(gradient).mul_(ORTHOGONAL * math.sqrt(max(gradient.shape)))
            else:
                rms = torch.linalg.vector_norm(gradient) / math.sqrt(gradient.numel())
                update = gradient.div_(rms.clamp(min=_TINY))
            weight.add_(update, alpha=-self.share * float(active.param_groups[0]["lr"]))

        hooks: list[RemovableHandle] = []
        for name, parameter in self.also_updates(partition, active.block).items():
            hook = partial(move, is_matrix=name in matrices)
            hooks.append(parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def orthogonalize(matrix: Tensor) -> Tensor:
    """(m, n) -> bf16 (m, n) with the same singular vectors and singular values near 1, as in `torch.optim.Muon`."""
    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    return _muon._zeropower_via_newtonschulz(matrix, coefficients, _muon.DEFAULT_NS_STEPS, _muon.EPS)

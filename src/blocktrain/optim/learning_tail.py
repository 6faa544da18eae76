"""A tail that learns without memory: what lies above the active block is moved inside the backward pass.

    backward     prefix     active block           tail
                            gradients are kept  <- one weight at a time: its gradient comes, moves it, is gone

The activation gradients of the tail are computed anyway, so that its weight gradients cost a third of a full step
there, and no memory but the inputs of its layers: no moments, no master, no gradient that outlives its weight's turn
(the fused update of LOMO, Lv et al. 2023). A weight may be moved as soon as its gradient is whole: nothing that is
still to be differentiated uses it.

    sgd              W -= rate * G / rms(G)                                     every weight
    newton-schulz    W -= 2 rate * O / rms(O), O the nearest orthogonal to G    hidden matrices; the rest as above
                     (Muon without its momentum, Jordan et al. 2024)

`rate` is `Tail.share` times the learning rate of the active block's first group at that moment, so a root mean square
step against AdamW's, which is near one. There is no weight decay, and clipping and gradient norms know the active block
alone. In all else the tail stays frozen: eval mode, so that its dropout does nothing and its BatchNorm does not move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import _muon
from torch.utils.hooks import RemovableHandle

from blocktrain.chain.block import Partition
from blocktrain.errors import ConfigError, nearest
from blocktrain.optim.in_backward import require_single_process
from blocktrain.optim.offloaded_weights import FrozenPlace, OnDevice
from blocktrain.optim.precision import Precision

Rule = Literal["sgd", "newton-schulz"]

ORTHOGONAL = 2.0  # of an orthogonal update against one of plain SGD: the best shares found were 0.2 and 0.1
_TINY = 1e-30  # of a gradient that is zero, the root mean square


@dataclass(frozen=True, kw_only=True)
class Tail:
    """How the layers above the active block are moved.

    rule: "sgd" or "newton-schulz" (hidden matrices orthogonalized). share: of the learning rate, what they move by.
    """

    rule: Rule
    share: float = 0.1

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ConfigError(f"tail '{self.rule}' is unknown; {nearest(self.rule, get_args(Rule))}")
        if not 0 < self.share < math.inf:
            raise ConfigError(f"tail_share must be positive, not {self.share:g}")


def require_possible(tail: Tail, partition: Partition, precision: Precision, place: FrozenPlace) -> None:
    """Raise `ConfigError` where frozen weights cannot be moved as they lie."""
    said = f"tail = '{tail.rule}' moves weights inside the backward pass"
    if precision.has_master:
        raise ConfigError(f"{said}, where those of precision '{precision.name}' have no master: set precision = 'fp32'")
    if not isinstance(place, OnDevice):
        raise ConfigError(f"{said}, and memory.frozen = 'host' keeps them away: set memory.frozen = 'device'")
    for block in partition:
        if block.rows:
            raise ConfigError(f"{said}, whole; {block} has rows of '{next(iter(block.rows))}' only: use larger blocks")
    require_single_process(said)


@contextmanager
def moving(
    tail: Tail | None,
    parameters: Mapping[str, nn.Parameter],
    *,
    matrices: Collection[str],
    learning_rate: Callable[[], float],
) -> Iterator[None]:
    """Inside, every backward pass moves `parameters` as `tail` says (None: not at all); there must be one a step.

    matrices: names of those that are orthogonalized. learning_rate: asked at each update.
    """
    hooks: list[RemovableHandle] = []
    if tail is not None:
        for name, parameter in parameters.items():
            update = _orthogonal if tail.rule == "newton-schulz" and name in matrices else _normalised
            move = partial(_move, update, lambda: tail.share * float(learning_rate()))
            hooks.append(parameter.requires_grad_(True).register_post_accumulate_grad_hook(move))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _move(update: Callable[[Tensor], Tensor], rate: Callable[[], float], weight: Tensor) -> None:
    gradient, weight.grad = weight.grad, None
    if gradient is not None:
        weight.add_(update(gradient), alpha=-rate())


def _normalised(gradient: Tensor) -> Tensor:
    rms = torch.linalg.vector_norm(gradient) / math.sqrt(gradient.numel())
    return gradient.div_(rms.clamp(min=_TINY))


def _orthogonal(gradient: Tensor) -> Tensor:
    """An orthogonal (m, n) matrix has min(m, n) singular values of 1, so its rms is 1 / sqrt(max(m, n))."""
    return orthogonalize(gradient).mul_(ORTHOGONAL * math.sqrt(max(gradient.shape)))


def orthogonalize(matrix: Tensor) -> Tensor:
    """(m, n) -> bf16 (m, n) with the same singular vectors and singular values near 1, as in `torch.optim.Muon`."""
    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    return _muon._zeropower_via_newtonschulz(matrix, coefficients, _muon.DEFAULT_NS_STEPS, _muon.EPS)

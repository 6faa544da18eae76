"""Parameters whose value is elsewhere: packed, on the host, or both, until a module computes with them.

Such a parameter keeps its shape, dtype and device, and no memory but one NaN that stands for all its elements: whoever
reads it without waking it is told so by every number that comes out. What does hold its value is written on it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def replace_by_placeholder(parameter: nn.Parameter, parts: tuple[Tensor, ...]) -> None:
    """Free the memory of `parameter`, whose value `parts` hold from now on."""
    nan = parameter.data.new_full((), torch.nan)
    parameter.data = nan.expand(parameter.shape)
    setattr(parameter, "_tensors_behind", parts)  # noqa: B010 - parameters have no such attribute to a type checker


def restore_value(parameter: nn.Parameter, value: Tensor) -> None:
    """Give `parameter` its value back."""
    parameter.data = value
    if is_placeholder(parameter):
        delattr(parameter, "_tensors_behind")


def is_placeholder(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter that was put away."""
    return hasattr(tensor, "_tensors_behind")


def tensors_behind(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the value of `tensor`: itself, unless it was put away."""
    return getattr(tensor, "_tensors_behind", (tensor,))

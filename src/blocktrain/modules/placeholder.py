"""Placeholders: parameters whose value is stored elsewhere (quantized, on the host, or both) until a module needs it.

A placeholder keeps the parameter's shape, dtype and device, but its only memory is one NaN, expanded to the whole
shape: code that reads it without materializing it first gets NaN in every result. The tensors that hold the value are
an attribute of the parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def replace_by_placeholder(parameter: nn.Parameter, backing: tuple[Tensor, ...]) -> None:
    """Free the memory of `parameter`; from now on the tensors `backing` hold its value."""
    nan = parameter.data.new_full((), torch.nan)
    parameter.data = nan.expand(parameter.shape)
    setattr(parameter, "_backing_tensors", backing)  # noqa: B010 - parameters have no such attribute to a type checker


def restore_value(parameter: nn.Parameter, value: Tensor) -> None:
    """Give `parameter` its value back."""
    parameter.data = value
    if is_placeholder(parameter):
        delattr(parameter, "_backing_tensors")


def is_placeholder(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter that was replaced by a placeholder."""
    return hasattr(tensor, "_backing_tensors")


def backing_tensors(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the value of `tensor`: itself, unless it is a placeholder."""
    return getattr(tensor, "_backing_tensors", (tensor,))

"""A copy of a model without memory that still runs the model's own code: shapes, devices and operations, no numbers.

What a step costs, and in which order a model runs its layers, is found by running the model, not by a formula for each
architecture. Fake parameters and buffers make that cheap: it takes no memory and little time (seconds for a 7B model),
and leaves the model, its buffers and the random number generators alone.

Only the model is fake; its inputs are real, because transformers looks at the mask and the positions to choose the code
that it runs. With fake inputs it believes that it is being traced, builds an explicit mask and loses grouped queries in
the attention kernel (equal FLOPs, but a small Llama saved 12 % more). So the inputs must be on the model's device. Then
the code that runs, and with it the choice of kernels, is the model's own.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode

from blocktrain.modules.dispatch import EagerDispatchMode
from blocktrain.modules.placeholder import is_placeholder

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(frozen=True, eq=False)
class FakeCopy:
    """A model whose parameters and buffers are fake."""

    model: nn.Module

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The context to call `model` in, with real inputs on the model's device (the CPU if that was meta)."""
        accelerators = {t.device for t in self.model.parameters() if t.device.type != "cpu"}
        kind = next((device.type for device in accelerators), "cuda")
        experts = any(parameter.dim() == 3 for parameter in self.model.parameters())  # a layer's experts are stacked
        with (  # a model may also draw real random numbers (OPT does, for its layer dropout)
            torch.random.fork_rng([device.index or 0 for device in accelerators], device_type=kind),
            _InPlaceIsFree(),
            _GroupedMatmulInBf16() if experts else contextlib.nullcontext(),
        ):
            yield


def fake_copy(model: nn.Module) -> FakeCopy:
    """A copy of `model` without memory. Tied parameters stay tied, and modules keep their train or eval mode; hooks are
    not copied. A model on the meta device is copied as if it were on the CPU. Inside a `FakeTensorMode` the copy is of
    that mode, so that it can be called with its tensors.
    """
    mode = active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)
    # deepcopy uses what `memo` has instead of copying: tensors without memory, and empty hook tables. A hook of the
    # real model must not fire on the copy, and the objects that it refers to must not be copied.
    memo: dict[int, Tensor | OrderedDict[int, object]] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        memo[id(tensor)] = _without_memory(tensor, mode)
    for module in model.modules():
        for table in (getattr(module, name, None) for name in HOOKS):
            if table is not None:
                memo[id(table)] = OrderedDict()
    replica = copy.deepcopy(model, memo)
    _make_experts_shape_static(replica)
    return FakeCopy(replica)


def _without_memory(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
        with mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake
    if is_placeholder(tensor):  # its one number stands for all: the copy gets the layout of the whole weight
        with mode:
            return nn.Parameter(
                torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), tensor.requires_grad
            )
    fake = mode.from_tensor(tensor)
    fake.grad = None  # the gradient of a step in progress does not belong to the model
    return fake


def _make_experts_shape_static(model: nn.Module) -> None:
    """Replaces the eager loop over experts, which asks which experts were chosen: a tensor without numbers cannot say.
    The grouped matrix product does the same work in one operation."""
    config = getattr(model, "config", None)
    if getattr(config, "_experts_implementation", None) == "eager" and hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(ValueError):  # a model without experts refuses the setting
            cast(Any, model).set_experts_implementation("grouped_mm")


class _InPlaceIsFree(EagerDispatchMode):
    """An operation that writes into a tensor without memory changes nothing, so it is not run at all.

    PyTorch takes a tenth of a millisecond for each operation on such tensors, and most operations of an optimizer's
    step are in place. Modes that are entered later (counters, trackers) still see the operation.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _writes_into_its_first_argument(func) and isinstance(args[0], FakeTensor):
            return args[0]
        return func(*args, **(kwargs or {}))


@cache
def _writes_into_its_first_argument(func: Any) -> bool:
    """Whether an operation does nothing else, and leaves shape, strides and storage of this argument as they are."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.inplace_view in func.tags:
        return False
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
    name, returns = func._schema.name, func._schema.returns
    in_place = name.startswith("aten::") and name.endswith("_") and len(returns) == 1
    return in_place and written[0] and sum(written) == 1


class _GroupedMatmulInBf16(EagerDispatchMode):
    """Runs the grouped matrix product in bf16: its shape function takes nothing else (PyTorch 2.13), although its CPU
    kernel also takes float32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            left, right, *rest = args
            product = func(left.to(torch.bfloat16), right.to(torch.bfloat16), *rest, **kwargs)
            return product.to(left.dtype)
        return func(*args, **kwargs)

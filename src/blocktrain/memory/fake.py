"""A copy of a model that takes no memory and runs its own code: shapes, devices and operations without numbers.

What a step costs, and in which order a model runs its layers, is found by running the model, not by formulas for
each architecture. With parameters and buffers that are fake that takes no memory and little time (a 7B model: seconds),
and touches neither the model nor its buffers nor the random numbers.

Only the model is fake, its inputs are real: transformers looks at mask and positions to choose the code it runs. With
fake ones it believes it is being traced, builds an explicit mask and loses grouped queries in the attention kernel
(same FLOPs, but a small Llama saved 12 % more). So inputs must be on the model's device, and the code that runs, and
with it the choice of kernels, is that of the model itself.
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
        """Call `model` inside this context only, with real inputs on the model's device (CPU, if it was on meta)."""
        accelerators = {t.device for t in self.model.parameters() if t.device.type != "cpu"}
        kind = next((device.type for device in accelerators), "cuda")
        experts = any(parameter.dim() == 3 for parameter in self.model.parameters())  # stacked, those of a layer
        with (  # what a model draws outside its own tensors is drawn for real (OPT, for its layer dropout)
            torch.random.fork_rng([device.index or 0 for device in accelerators], device_type=kind),
            _InPlaceIsFree(),
            _GroupedMatmulOfAnyDtype() if experts else contextlib.nullcontext(),
        ):
            yield


def fake_copy(model: nn.Module) -> FakeCopy:
    """A copy of `model` without memory: tied parameters stay tied, modes (train or eval) stay, hooks are left behind.

    A model on the meta device is copied as if it were on the CPU.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # deepcopy takes from `memo` what it would otherwise copy: tensors without memory, empty hook tables (a hook of
    # the real model must not fire, nor the objects it holds be copied, for the sake of a count).
    memo: dict[int, Any] = {}
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
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
        with mode:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake
    if is_placeholder(tensor):  # one number that stands for all: the copy has the layout of the weight it stands for
        with mode:
            return nn.Parameter(
                torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), tensor.requires_grad
            )
    fake = mode.from_tensor(tensor)
    fake.grad = None  # the gradient of a step in progress is not part of the model
    return fake


def _make_experts_shape_static(model: nn.Module) -> None:
    """The plain loop over experts asks which experts were hit, which no tensor without numbers can answer; the
    grouped matrix product does the same work in one operation."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "_experts_implementation", None) == "eager" and hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(ValueError):  # a model without experts refuses the setting
            cast(Any, model).set_experts_implementation("grouped_mm")


class _InPlaceIsFree(EagerDispatchMode):
    """An operation that writes into a tensor without numbers changes nothing, so it is not run at all.

    PyTorch takes a tenth of a millisecond for each operation on such tensors, and an optimizer's step is hardly
    anything but operations in place. Modes that are entered later (counters, trackers) see the operation as ever.
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


class _GroupedMatmulOfAnyDtype(EagerDispatchMode):
    """The shape function of the grouped matrix product takes bf16 only (torch 2.13), its CPU kernel also float32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            left, right, *rest = args
            product = func(left.to(torch.bfloat16), right.to(torch.bfloat16), *rest, **kwargs)
            return product.to(left.dtype)
        return func(*args, **kwargs)

"""Placeholders: parameters whose value is stored elsewhere (quantized, on the host, or both) until a module needs it.

A placeholder keeps the parameter's shape, dtype and device, and has no memory of its own. The tensors that hold the
value are an attribute of the parameter. Whoever asks for the shape, the dtype or the gradient gets them; any operation
that needs the numbers

    in a forward pass of the whole model, or in a backward pass    computes with the materialized value
    anywhere else, and wherever it would write into the weight     raises `StoredWeightError`

The first case is a library that takes a layer's weight instead of calling the layer (a fused loss takes
`lm_head.weight`). A parameter becomes a placeholder by a change of its class, as PyTorch's own uninitialized parameters
do, so it stays the same object for everyone who holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from blocktrain.errors import ConfigError, StoredWeightError

# Operations that ask for nothing but the layout, or that make a tensor of the same layout with other numbers.
_LAYOUT = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous"),
    *("is_floating_point", "is_complex", "is_signed", "is_same_size", "get_device", "untyped_storage", "__len__"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "_has_compatible_shallow_copy_type"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"),
}
_NUMBERS = {"T", "H", "mT", "mH", "real", "imag", ""}  # attributes that are computed from the numbers; "": a property
_CONVERSIONS = {"to", "cpu", "cuda", "float", "half", "bfloat16", "double", "type", "contiguous"}
_WRITES = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))}


class _Placeholder(nn.Parameter):
    """The class of a parameter while its value is stored elsewhere."""

    _backing_tensors: tuple[Tensor, ...]
    _name: str
    _materialize: Callable[[], Tensor | None]  # None: nothing may read the value now

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(getattr(func, "overloadpacket", func), "__name__", str(func))
        if func.__class__.__name__ == "method-wrapper":  # an attribute is read, set or deleted
            return _attribute(getattr(func.__self__, "__name__", ""), func, args)
        if name in _LAYOUT:
            return _plainly(func, args, kwargs)
        if name == "detach":
            return _alias(args[0], _plainly(func, args, kwargs))
        if name == "__repr__":
            return f"<'{_name_of(args[0])}' {tuple(args[0].shape)} {args[0].dtype}, stored elsewhere>"
        if name in _CONVERSIONS and isinstance(args[0], _Placeholder):
            converted = _plainly(func, args, kwargs)
            if converted is args[0]:  # it has that device and dtype already
                return converted
            raise _error(args[0], name)
        writes = name in _WRITES or "out" in kwargs or (name.endswith("_") and not name.endswith("__"))
        found: list[_Placeholder] = []
        tree_map_only(_Placeholder, found.append, (args, kwargs))
        values: dict[int, Tensor] = {}
        for placeholder in found:
            materialize = getattr(placeholder, "_materialize", None)
            value = None if writes or materialize is None else materialize()
            if value is None or name == "data_ptr":  # the memory of `value` may be gone when the pointer is used
                raise _error(placeholder, name)
            values[id(placeholder)] = value
        positional, named = tree_map_only(_Placeholder, lambda each: values[id(each)], (args, kwargs))
        return func(*positional, **cast(dict[str, Any], named))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A placeholder with no value at all: whatever reads it raises."""
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                copy = nn.Parameter(self.data[(0,) * self.ndim].clone().expand(self.shape), self.requires_grad)
            copy.__class__ = _Placeholder
            cast(_Placeholder, copy)._name = _name_of(self)
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _error(self, "pickle")


def replace_by_placeholder(
    parameter: nn.Parameter,
    backing: tuple[Tensor, ...],
    name: str,
    materialize: Callable[[], Tensor | None],
    *,
    device: torch.device,
) -> None:
    """Free the memory of `parameter`; from now on the tensors `backing` hold its value.

    name: what messages call it. materialize: a tensor with its value, or None while nothing may read it. device: where
    the parameter is from now on, for whoever asks.
    """
    if is_placeholder(parameter):  # it gets another value
        cast(_Placeholder, parameter)._backing_tensors = backing
        return
    # A backstop for code that reads memory without asking PyTorch.
    nan = parameter.data.new_full((), torch.nan, device=device)
    if not isinstance(parameter, FakeTensor) and type(parameter) is not nn.Parameter:
        raise ConfigError(
            f"'{name}' is a {type(parameter).__name__}, whose value cannot be stored elsewhere: keep frozen weights as "
            "they are (precision=BF16_EXACT or FP32, frozen=OnDevice())"
        )
    parameter.data = nan.expand(parameter.shape)
    if not isinstance(parameter, FakeTensor):  # there are no numbers to read in a fake tensor
        parameter.__class__ = _Placeholder
    placeholder = cast(_Placeholder, parameter)
    placeholder._backing_tensors, placeholder._name, placeholder._materialize = backing, name, materialize


def restore_value(parameter: nn.Parameter, value: Tensor) -> None:
    """Give `parameter` its value back."""
    if is_placeholder(parameter):
        if not isinstance(parameter, FakeTensor):
            parameter.__class__ = nn.Parameter
        for attribute in ("_backing_tensors", "_name", "_materialize"):
            vars(parameter).pop(attribute, None)
    parameter.data = value


def is_placeholder(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter that was replaced by a placeholder."""
    return isinstance(tensor, _Placeholder) or hasattr(tensor, "_backing_tensors")


def backing_tensors(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the value of `tensor`: itself, unless it is a placeholder."""
    return getattr(tensor, "_backing_tensors", (tensor,))


def _attribute(name: str, func: Any, args: tuple[Any, ...]) -> Any:
    placeholder = args[0]
    sets_numbers = func.__name__ == "__set__" and name == "data" and not is_placeholder(args[1])
    if name in _NUMBERS or sets_numbers:
        value = None
        if not sets_numbers and hasattr(placeholder, "_materialize"):
            value = placeholder._materialize()
        if value is None:
            raise _error(placeholder, name or func.__name__)
        return func(value, *args[1:])
    result = _plainly(func, args, {})
    return _alias(placeholder, result) if name == "data" and func.__name__ == "__get__" else result


def _alias(placeholder: _Placeholder, tensor: Tensor) -> Tensor:
    """`tensor`, which has no memory either, as a placeholder of the same value."""
    alias = tensor.as_subclass(_Placeholder)
    vars(alias).update(vars(placeholder))
    return alias


def _plainly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _name_of(placeholder: Tensor) -> str:
    return getattr(placeholder, "_name", "a weight")


def _error(placeholder: Tensor, operation: str) -> StoredWeightError:
    if not hasattr(placeholder, "_materialize"):
        return StoredWeightError(
            f"'{operation}' needs the value of '{_name_of(placeholder)}', and this is a copy of a model whose frozen "
            "weights were stored elsewhere: copy model.state_dict(), or close() the BlockOptimizer before you copy"
        )
    return StoredWeightError(
        f"'{operation}' needs the value of '{_name_of(placeholder)}' outside of the model's forward pass, while the "
        "weight is frozen and stored quantized or on the host: call the layer instead, read model.state_dict(), "
        "close() the BlockOptimizer first, or keep frozen weights as they are (precision=BF16_EXACT, frozen=OnDevice())"
    )

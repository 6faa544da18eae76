"""Frozen linear layers compute in int8: the forward pass and the activation gradient, from one int8 copy of the weight.

A frozen weight W (out, in) = diag(s) C does not change during a visit, so it is quantized once: codes C in int8, one
fp32 scale s for each output channel. What it is multiplied with is quantized in each call, one scale for each row:

    forward               y = x W^T      x   = diag(a) (Q + R / 254)       y  = diag(a) (Q C^T + R C^T / 254) diag(s)
    activation gradient   dx = g W       g s = diag(b) P                   dx = diag(b) (P C)

Inputs have outliers, which leave few of 8 bits for the rest of their row, so R holds what rounding to Q has lost: 16
bits for two products. Gradients have none worth that (measured: docs/decisions/0022-frozen-compute.md).

Products of codes are summed exactly in int32, and a row's scale depends on that row alone. So a row has the same result
in any batch, and prefixes that were stored in another batch are the same bit for bit.

A NaN or an infinity makes its row's scale, and with it the row's whole result, non-finite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from blocktrain.errors import ConfigError
from blocktrain.modules.wrap import NotCopied, wrap_forward

log = logging.getLogger(__name__)

FrozenCompute = Literal["exact", "int8"]

WIDEST = 2**31 // 127**2  # products of codes that int32 can sum
_CUDA_ROWS, _CUDA_MULTIPLE = 32, 8  # cuBLAS wants more than 16 rows, and widths that are multiples of 8
_SMALLEST = 1e-30  # of a scale: its reciprocal must be finite
_FINER = 254  # steps of R in one step of Q, whose rounding error is at most half a step


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """One quantized weight. `parts` are all its tensors.

    codes: (out, in) int8. scales: (out,) fp32. transposed: the parameter itself is (in, out).
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype
    transposed: bool = False

    @classmethod
    def of(cls, weight: Tensor, *, transposed: bool = False) -> Int8Weight:
        """The int8 copy of a weight (out, in), or (in, out) if `transposed`."""
        codes, scales, _ = _quantize_rows(weight.t() if transposed else weight)
        return cls(codes.contiguous(), scales.squeeze(1), weight.dtype, transposed)

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Codes and scales."""
        return self.codes, self.scales

    def dequantize(self, parts: Sequence[Tensor] | None = None) -> Tensor:
        """The parameter as it computes, in its own dtype and shape; from `parts` or from copies of them."""
        codes, scales = self.parts if parts is None else parts
        weight = codes.float().mul_(scales.unsqueeze(1)).to(self.dtype)
        return weight.t() if self.transposed else weight

    def forward(self, rows: Tensor) -> Tensor:
        """(rows, in) -> (rows, out) in the same dtype."""
        coarse, scales, units = _quantize_rows(rows)
        fine = units.sub_(coarse).mul_(_FINER).round_().to(torch.int8)
        total = _int_mm(coarse, self.codes.t()).float()
        total.add_(_int_mm(fine, self.codes.t()), alpha=1 / _FINER)
        return total.mul_(scales).mul_(self.scales).to(rows.dtype)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """(rows, out) -> (rows, in) in the same dtype."""
        rows, scales, _ = _quantize_rows(gradient * self.scales)
        return _int_mm(rows, self.codes).float().mul_(scales).to(gradient.dtype)


class Int8Layers:
    """The linear layers of a model, which compute in int8 while they are frozen and a visit trains another block.

    In eval mode (an evaluation, answers that are generated) and between visits they compute exactly. Layers of `exact`
    always do, as do those whose shape the device's int8 product cannot take; what is left out for that is logged once.

    device: where the model computes; by default where its weights are.

    Memory: one byte for each frozen weight, made when the layer first runs and freed when its block becomes active.
    """

    def __init__(self, model: nn.Module, *, exact: Iterable[nn.Module], device: torch.device | None = None):
        self.weights: dict[nn.Parameter, Int8Weight] = {}
        self.parameters: dict[nn.Parameter, bool] = {}  # those that can be quantized -> whether they are (in, out)
        self._versions: dict[nn.Parameter, int] = {}
        self._active: tuple[nn.Module, ...] = ()  # the modules of the block that is trained
        self._undo: list[Callable[[], None]] = []
        first = next(model.parameters())
        device, is_fake = device or first.device, isinstance(first, FakeTensor)
        if not is_fake:
            _require_product(device)
        kept = {part for module in exact for part in module.modules()}
        left_out = []
        for name, module in model.named_modules():
            if module in kept:
                continue
            weight: Any = module._parameters.get("weight")
            if type(module) not in (nn.Linear, Conv1D):
                left_out += [f"{name}.{key}" for key, own in module.named_parameters(recurse=False) if own.ndim == 3]
            elif max(weight.shape) > WIDEST or (device.type == "cuda" and _is_odd(weight)):
                left_out.append(f"{name}.weight")
            else:
                self.parameters[weight] = type(module) is Conv1D
                self._undo.append(wrap_forward(module, _Int8Linear(self, module, weight)))
        if not self.parameters:
            raise ConfigError(
                f"frozen_compute = 'int8', but {type(model).__name__} has no linear layer below its head that could "
                "compute in int8; set frozen_compute = 'exact'"
            )
        if left_out and not is_fake:
            log.warning(
                "frozen compute in int8: %d weights compute exactly, because the int8 product of '%s' does not take "
                "their shapes: %s",
                len(left_out),
                device,
                ", ".join([*left_out[:4], *(["..."] if len(left_out) > 4 else [])]),
            )

    def activate(self, modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> None:
        """A block with these modules and parameters is trained from now on."""
        self._active = tuple(modules)
        for parameter in parameters:
            self.weights.pop(parameter, None)

    def retire(self) -> None:
        """No block is trained: everything computes exactly."""
        self._active = ()

    @property
    def is_on(self) -> bool:
        """Whether frozen layers compute in int8 now."""
        return any(module.training for module in self._active)

    def weight(self, parameter: nn.Parameter, value: Tensor) -> Int8Weight:
        """The int8 copy of `parameter`, whose value now is `value`; quantized again if that has changed in place."""
        if parameter not in self.weights or self._versions.get(parameter) != parameter._version:
            return self.put(parameter, value)
        return self.weights[parameter]

    def put(self, parameter: nn.Parameter, value: Tensor) -> Int8Weight:
        """Quantize `value`, which `parameter` has from now on."""
        # A tensor made in inference mode could not be used in a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            self.weights[parameter] = weight = Int8Weight.of(value, transposed=self.parameters[parameter])
        self._versions[parameter] = parameter._version
        return weight

    def nbytes(self, parameter: nn.Parameter) -> int:
        """Bytes of the int8 copy of `parameter`; 0 where it has none."""
        if parameter not in self.parameters:
            return 0
        out = parameter.shape[1 if self.parameters[parameter] else 0]
        return parameter.numel() + 4 * out

    def close(self) -> None:
        """Free all copies and remove the wrappers."""
        self.weights.clear()
        while self._undo:
            self._undo.pop()()


@dataclass(frozen=True, eq=False)
class _Int8Linear(NotCopied):
    """The wrapper around one linear layer."""

    layers: Int8Layers
    module: nn.Module
    parameter: nn.Parameter  # the module may compute with a tensor in its place

    def __call__(self, run: Callable[..., Any], x: Tensor) -> Tensor:
        if self.parameter.requires_grad or not self.layers.is_on:
            return run(x)
        weight = self.layers.weight(self.parameter, self.module.weight)  # pyright: ignore[reportArgumentType]
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Any = _Product.apply(x, weight)
        bias: Any = self.module.bias
        return y if bias is None else y + bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """(..., in) -> (..., out). Nothing is saved for the backward pass but the weight, which is a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Int8Weight) -> Tensor:
        """See the class."""
        ctx.weight = weight
        return weight.forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its names
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        """The gradient of the output (..., out) -> that of the input (..., in)."""
        rows = ctx.weight.input_gradient(gradient.reshape(-1, gradient.shape[-1]))
        return rows.view(*gradient.shape[:-1], -1), None


def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, n) -> codes (rows, n) in int8, scales (rows, 1) in fp32, and x in units of its scales, in fp32."""
    scales = x.abs().amax(1, keepdim=True).float().div_(127).clamp_min_(_SMALLEST)
    units = x.float() * scales.reciprocal()
    return units.round().to(torch.int8), scales, units


def _int_mm(left: Tensor, right: Tensor) -> Tensor:
    rows = len(left)
    if left.is_cuda and rows < _CUDA_ROWS:
        return torch._int_mm(pad(left, (0, 0, 0, _CUDA_ROWS - rows)), right)[:rows]
    return torch._int_mm(left, right)


def _is_odd(weight: Tensor) -> bool:
    return any(size % _CUDA_MULTIPLE for size in weight.shape)


def _require_product(device: torch.device) -> None:
    """Raise `ConfigError` unless PyTorch has an int8 product on `device`."""
    try:
        codes = torch.ones(_CUDA_ROWS, _CUDA_ROWS, dtype=torch.int8, device=device)
        torch._int_mm(codes, codes.t())
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"frozen_compute = 'int8', but PyTorch has no int8 matrix product on '{device}'; set frozen_compute = "
            "'exact'"
        ) from error

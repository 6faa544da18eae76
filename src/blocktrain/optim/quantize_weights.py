"""Quantizes weights to 8 or 4 bits, for the time in which nothing computes with them, and dequantizes them.

    int8   symmetric, one bf16 scale for 128 weights: 8.125 bits a weight
    nf4    NormalFloat4, the 16 quantiles of a normal distribution (Dettmers et al. 2023, QLoRA, appendix E), one bf16
           scale for 64 weights, two codes a byte, the first in the high half: 4.25 bits a weight

Groups run over the flattened weight; the last one is padded with zeros. A dequantized weight is its code times its
group's scale, computed in fp32 and rounded once, so every device and kernel gives the same value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocktrain.optim.precision import Format

INT8_GROUP, NF4_GROUP = 128, 64
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_NF4 = torch.tensor(NF4_VALUES)  # copied to a device without waiting for it, as so few bytes are
_CHUNK = 2**22  # weights quantized or dequantized at a time (whole groups), so that fp32 intermediates stay small


@dataclass(frozen=True, eq=False)
class Quantized:
    """One quantized weight. `parts` are all its tensors: codes and scales, or for fp32 and bf16 the weight itself."""

    format: Format
    shape: torch.Size
    dtype: torch.dtype  # of the dequantized weight
    parts: tuple[Tensor, ...]

    def dequantize(self, parts: tuple[Tensor, ...] | None = None) -> Tensor:
        """The weight, from `self.parts` or from copies of them on another device. A new tensor, except for fp32 and
        bf16."""
        parts = self.parts if parts is None else parts
        if self.format in ("fp32", "bf16"):
            return parts[0]
        codes, scales = parts
        if self.format == "int8":  # a code has 7 bits and a scale 8: their product is exact before it is rounded
            weight = codes.to(self.dtype).mul_(scales.to(self.dtype).unsqueeze(1))
        else:
            weight = _dequantize_nf4(codes, scales, self.dtype)
        return weight.view(-1)[: self.shape.numel()].view(self.shape)


@torch.no_grad()
def quantize(weight: Tensor, form: Format) -> Quantized:
    """Quantize `weight` on its device. "fp32" and "bf16" leave it as it is."""
    if form in ("fp32", "bf16"):
        return Quantized(form, weight.shape, weight.dtype, (weight,))
    quantize_flat = _quantize_int8 if form == "int8" else _quantize_nf4
    codes, scales = zip(*[quantize_flat(part) for part in weight.reshape(-1).split(_CHUNK)], strict=True)
    return Quantized(form, weight.shape, weight.dtype, (torch.cat(codes), torch.cat(scales)))


def _quantize_int8(flat: Tensor) -> tuple[Tensor, Tensor]:
    groups = _groups(flat, INT8_GROUP)
    scales = (groups.abs().amax(1) / 127).to(torch.bfloat16)
    # Where bf16 rounds a scale down, the largest weight's code is up to 0.25 above 127: less than rounding loses
    # anyway.
    codes = groups.div_(_divisor(scales)).round_().clamp_(-127, 127).to(torch.int8)
    return codes, scales


def _quantize_nf4(flat: Tensor) -> tuple[Tensor, Tensor]:
    groups = _groups(flat, NF4_GROUP)
    scales = groups.abs().amax(1).to(torch.bfloat16)
    values = _NF4.to(flat.device, non_blocking=True, copy=True)
    codes = torch.bucketize(groups.div_(_divisor(scales)), (values[1:] + values[:-1]) / 2, out_int32=True)
    high, low = codes.to(torch.uint8).view(-1, 2).unbind(1)
    return high << 4 | low, scales


def _groups(flat: Tensor, size: int) -> Tensor:
    """(groups, size) in fp32, padded with zeros."""
    return pad(flat, (0, -flat.numel() % size)).view(-1, size).float()


def _divisor(scales: Tensor) -> Tensor:
    """The scales to divide by. A group of zeros has scale 0, and any code will do."""
    return scales.float().masked_fill_(scales == 0, 1).unsqueeze(1)


def _dequantize_nf4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The flat weight, with its padding."""
    if codes.is_cuda and has_bitsandbytes():
        padded = [2 * codes.numel()]
        return torch.ops.bitsandbytes.dequantize_4bit(codes, scales.float(), NF4_GROUP, "nf4", padded, dtype)
    values = _NF4.to(codes.device, non_blocking=True, copy=True)
    pairs = torch.cartesian_prod(values, values)  # (256, 2): the two values of each byte
    weight = codes.new_empty(2 * codes.numel(), dtype=dtype)
    for start in range(0, weight.numel(), _CHUNK):
        end = min(start + _CHUNK, weight.numel())
        groups = pairs[codes[start // 2 : end // 2].int()].view(-1, NF4_GROUP)
        groups *= scales[start // NF4_GROUP : end // NF4_GROUP].unsqueeze(1)
        weight[start:end] = groups.view(-1)
    return weight


@cache
def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed. Importing it here registers its kernels."""
    if find_spec("bitsandbytes") is None:
        return False
    import bitsandbytes  # noqa: F401  # pyright: ignore[reportMissingImports]

    return True

"""The formats of weights, masters and moments, as one typed value, and the exact split of fp32 into bf16 and low bits.

                frozen weights   computed in   master              between visits
    fp32        fp32             fp32          none                -
    bf16        bf16             bf16          fp32, active block  rebuilt from bf16
    bf16-exact  bf16             bf16          fp32, active block  bf16 + low bits
    int8, nf4   8 or 4 bits      bf16          fp32, active block  bf16 + low bits

A frozen weight needs only the precision that the model computes with, or less. What this leaves out of the master is
kept when a block retires (except under `BF16`):

    fp32 master   s eeeeeeee mmmmmmm mmmmmmmmmmmmmmmm
    bf16 half     s eeeeeeee mmmmmmm                    rounded to nearest: what the model computes with
    low bits                         rrrrrrrrrrrrrrrr   signed 16 bits, on the host: master - half, in last places

Together they give the master back bit for bit. (A tool that rebuilds masters from bf16 alone was measured to keep 63 %
of the movement, at learning rate 1e-6 and 100 steps a visit.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from blocktrain.errors import ConfigError, nearest

Format = Literal["fp32", "bf16", "int8", "nf4"]
Moments = Literal["fp32", "8bit"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Formats of a run's tensors.

    name: the preset's name, as a configuration gives it.
    frozen: the format of frozen blocks' matrices; their norms and biases stay in `compute`.
    compute: the dtype of the active block's weights and of all activations.
    master: the dtype of the copy that the optimizer updates; None if it updates the weights themselves.
    low_bits: whether what `compute` leaves out of the master is kept between visits.
    accumulation: the dtype in which gradients of micro-batches are summed.
    moments: the format of the optimizer's two averages, if it has two; "fp32" means the master's dtype.
    """

    name: str
    frozen: Format
    compute: torch.dtype
    master: torch.dtype | None = torch.float32
    low_bits: Literal["kept", "dropped"] = "kept"
    accumulation: torch.dtype = torch.float32
    moments: Moments = "fp32"

    def __post_init__(self) -> None:
        whole = (self.frozen, self.compute, self.master) == ("fp32", torch.float32, None)
        halved = self.frozen != "fp32" and (self.compute, self.master) == (torch.bfloat16, torch.float32)
        if not (whole or halved) or self.accumulation != torch.float32:
            raise ConfigError(
                f"precision '{self.name}': frozen '{self.frozen}', compute {self.compute}, master {self.master}, "
                f"accumulation {self.accumulation} do not go together; start from one of {', '.join(PRESETS)}"
            )

    @property
    def has_master(self) -> bool:
        """Whether the active block is updated in an fp32 copy."""
        return self.master is not None

    @property
    def is_quantized(self) -> bool:
        """Whether frozen weights are stored in less than 16 bits, in another format than they are computed with."""
        return self.frozen in ("int8", "nf4")

    @property
    def keeps_low_bits(self) -> bool:
        """Whether frozen blocks keep on the host what makes their masters exact."""
        return self.has_master and self.low_bits == "kept"


FP32 = Precision(name="fp32", frozen="fp32", compute=torch.float32, master=None)
BF16 = Precision(name="bf16", frozen="bf16", compute=torch.bfloat16, low_bits="dropped")
BF16_EXACT = Precision(name="bf16-exact", frozen="bf16", compute=torch.bfloat16)
INT8 = Precision(name="int8", frozen="int8", compute=torch.bfloat16)
NF4 = Precision(name="nf4", frozen="nf4", compute=torch.bfloat16)
PRESETS = {precision.name: precision for precision in (FP32, BF16, BF16_EXACT, INT8, NF4)}


def preset(name: str) -> Precision:
    """The precision called `name`; raises `ConfigError` naming the nearest one."""
    if name not in PRESETS:
        is_16_bit = name.lower() in ("fp16", "float16", "half", "bfloat16")  # "bf16" is nearer, but loses updates
        raise ConfigError(f"precision {name!r} is unknown; {nearest('bf16-exact' if is_16_bit else name, PRESETS)}")
    return PRESETS[name]


# Scalars that are split or joined at a time: intermediate values take 4 to 8 bytes each, and a matrix can be large.
# (Results are made with `new_empty`, so that a fake tensor gives a fake tensor.)
_CHUNK = 2**22


def upper_half(master: Tensor) -> Tensor:
    """fp32 of any shape -> bf16, the value that the model computes with.

    Ties are rounded up: the bias is 3e-6, where truncation, which would be as exact, shrinks every weight by 0.3 %. NaN
    stays NaN: rounding alone would carry 0x7fffffff, the NaN that GPUs make, into -0.0.
    """
    upper = master.new_empty(master.shape, dtype=torch.bfloat16)
    for part, into in zip(_chunks(master), _chunks(upper), strict=True):
        bits = part.view(torch.int32).add(0x8000).bitwise_right_shift_(16)
        into.copy_(bits.to(torch.int16).view(torch.bfloat16).masked_fill_(part.isnan(), torch.nan))
    return upper


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 of any shape -> (bf16 half, int16 low bits) of the same shape."""
    upper = upper_half(master)
    low_bits = master.new_empty(master.shape, dtype=torch.int16)
    for part, high, into in zip(_chunks(master), _chunks(upper), _chunks(low_bits), strict=True):
        into.copy_(part.view(torch.int32) - (high.view(torch.int16).to(torch.int32) << 16))
    return upper, low_bits


def join(upper: Tensor, low_bits: Tensor) -> Tensor:
    """(bf16 half, int16 low bits) -> the fp32 master they were split from, bit for bit (NaN becomes some NaN)."""
    master = upper.new_empty(upper.shape, dtype=torch.float32)
    for high, low, into in zip(_chunks(upper), _chunks(low_bits), _chunks(master), strict=True):
        bits = into.view(torch.int32)
        bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(low)
    return master


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.contiguous().view(-1).split(_CHUNK)

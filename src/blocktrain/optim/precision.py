"""What each kind of tensor is stored in, as one typed value; and the exact split of fp32 into bf16 and 16 bits.

                frozen weights   computed in   master              between visits
    fp32        fp32             fp32          none                -
    bf16        bf16             bf16          fp32, active block  rebuilt from bf16
    bf16-exact  bf16             bf16          fp32, active block  bf16 + remainder
    int8, nf4   8 or 4 bits      bf16          fp32, active block  bf16 + remainder

A frozen weight needs only what the model computes with, or less. What that leaves out is not thrown away when a block
retires (but under `BF16`):

    fp32 master   s eeeeeeee mmmmmmm mmmmmmmmmmmmmmmm
    bf16 half     s eeeeeeee mmmmmmm                    rounded to nearest: what the model computes with
    remainder                        rrrrrrrrrrrrrrrr   signed 16 bits, on the host: master - half, in last places

ReplicatedBase they give the master back bit for bit. (Rebuilding a master from bf16 alone keeps 63 % of the movement at
learning rate 1e-6 and 100 steps a visit, as measured on a tool that does so.)
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

    name: of the preset, as a configuration gives it.
    frozen: of frozen blocks' matrices; their norms and biases stay in `compute`.
    compute: of the active block's weights and of all activations.
    master: of the copy that the optimizer moves; None where it moves the weights themselves.
    remainder: whether what `compute` leaves out of the master outlives a visit.
    accumulation: of the sum of micro-batches' gradients.
    moments: of the optimizer's two averages, if it keeps two; in fp32 they have the master's dtype.
    """

    name: str
    frozen: Format
    compute: torch.dtype
    master: torch.dtype | None = torch.float32
    remainder: Literal["kept", "dropped"] = "kept"
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
    def packs(self) -> bool:
        """Whether frozen weights rest in less than 16 bits, in another form than they are computed with."""
        return self.frozen in ("int8", "nf4")

    @property
    def keeps_low_bits(self) -> bool:
        """Whether frozen blocks leave on the host what makes their masters exact."""
        return self.has_master and self.remainder == "kept"


FP32 = Precision(name="fp32", frozen="fp32", compute=torch.float32, master=None)
BF16 = Precision(name="bf16", frozen="bf16", compute=torch.bfloat16, remainder="dropped")
BF16_EXACT = Precision(name="bf16-exact", frozen="bf16", compute=torch.bfloat16)
INT8 = Precision(name="int8", frozen="int8", compute=torch.bfloat16)
NF4 = Precision(name="nf4", frozen="nf4", compute=torch.bfloat16)
PRESETS = {precision.name: precision for precision in (FP32, BF16, BF16_EXACT, INT8, NF4)}


def preset(name: str) -> Precision:
    """The precision called `name`; raises `ConfigError` naming the nearest one."""
    if name not in PRESETS:
        half = name.lower() in ("fp16", "float16", "half", "bfloat16")  # "bf16" is nearer, and loses updates
        raise ConfigError(f"precision '{name}' is unknown; {nearest('bf16-exact' if half else name, PRESETS)}")
    return PRESETS[name]


# Scalars split or joined at a time: what is in between takes 4 to 8 bytes each, and a block's matrix can be large.
# (Tensors are made by `new_empty`: of a weight without memory it makes one without memory.)
_AT_A_TIME = 2**22


def half(master: Tensor) -> Tensor:
    """fp32 of any shape -> the bf16 that stands for it in the model.

    Rounds half up: unbiased to 3e-6, where truncation, as exact, would shrink every weight by 0.3 %. A NaN stays one:
    rounding would carry 0x7fffffff, the NaN that GPUs make, into -0.0.
    """
    upper = master.new_empty(master.shape, dtype=torch.bfloat16)
    for part, into in zip(_pieces(master), _pieces(upper), strict=True):
        bits = part.view(torch.int32).add(0x8000).bitwise_right_shift_(16)
        into.copy_(bits.to(torch.int16).view(torch.bfloat16).masked_fill_(part.isnan(), torch.nan))
    return upper


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 of any shape -> (bf16 half, int16 remainder) of the same shape."""
    upper = half(master)
    remainder = master.new_empty(master.shape, dtype=torch.int16)
    for part, high, into in zip(_pieces(master), _pieces(upper), _pieces(remainder), strict=True):
        into.copy_(part.view(torch.int32) - (high.view(torch.int16).to(torch.int32) << 16))
    return upper, remainder


def join(upper: Tensor, remainder: Tensor) -> Tensor:
    """(bf16 half, int16 remainder) -> the fp32 master they were split from, bit for bit (a NaN: as some NaN)."""
    master = upper.new_empty(upper.shape, dtype=torch.float32)
    for high, low, into in zip(_pieces(upper), _pieces(remainder), _pieces(master), strict=True):
        bits = into.view(torch.int32)
        bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(low)
    return master


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.contiguous().view(-1).split(_AT_A_TIME)

"""AdamW with its two averages in 8 bits (Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization).

Each group of 256 values has one fp32 scale, their largest magnitude. Each value has one code: the nearest entry of a
fixed table of 256 numbers in [-1, 1] (for the second average in [0, 1]), which is fine near 0 and covers seven decades.
That takes 2.03 bytes a parameter instead of 8.

The state has the layout of bitsandbytes' kernels. Where that package is installed, its kernels take the step on a CUDA
device; elsewhere plain PyTorch takes it, in chunks. (torchao's AdamW8bit was tried: it compiles for each shape, 19 s
for the first matrix on a CPU, refuses a learning rate that is set as a number, and its state is a tensor subclass,
which safetensors cannot write.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from blocktrain.optim.quantize_weights import has_bitsandbytes

GROUP = 256
SMALLEST = 4096  # elements; the averages of smaller parameters (norms, biases) stay in fp32, as in bitsandbytes
_CHUNK = 2**22  # scalars updated at a time, so that fp32 intermediates stay small


class AdamW8bit(torch.optim.Optimizer):
    """`torch.optim.AdamW` with 8-bit state.

    The state of a parameter: `step`, and for both averages codes (uint8, one for each element) and scales (fp32, one
    for 256 elements).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"AdamW8bit cannot take lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(_new_state(parameter))
                state["step"] += 1
                if parameter.numel() < SMALLEST:
                    averages = (state["exp_avg"], state["exp_avg_sq"])
                    _adamw(parameter.data, parameter.grad, averages, state["step"], group)
                else:
                    _update_8bit(parameter.data, parameter.grad, state, group)
        return loss


def _new_state(parameter: Tensor) -> dict[str, Any]:
    if parameter.numel() < SMALLEST:
        zeros = (parameter.data.new_zeros(parameter.shape, dtype=torch.float32) for _ in range(2))
        return {"step": 0, **dict(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True))}
    groups = -(-parameter.numel() // GROUP)
    state: dict[str, Any] = {"step": 0}
    for name, values in (("exp_avg", _table(signed=True)), ("exp_avg_sq", _table(signed=False))):
        state[name] = parameter.data.new_full(parameter.shape, values.index(0.0), dtype=torch.uint8)
        state[name + "_scale"] = parameter.data.new_zeros(groups, dtype=torch.float32)
    return state


def _adamw(weight: Tensor, gradient: Tensor, averages: tuple[Tensor, Tensor], step: int, group: dict[str, Any]) -> None:
    """One update in place (Loshchilov & Hutter 2019, algorithm 2)."""
    (beta1, beta2), (average, square) = group["betas"], averages
    average.lerp_(gradient.float(), 1 - beta1)
    square.mul_(beta2).addcmul_(gradient.float(), gradient.float(), value=1 - beta2)
    denominator = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.addcdiv_(average, denominator, value=-group["lr"] / (1 - beta1**step))


def _update_8bit(weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    tables = [table.to(weight.device, non_blocking=True, copy=True) for table in _TABLES]
    if weight.is_cuda and weight.is_contiguous() and has_bitsandbytes():
        _update_by_kernel(weight, gradient, state, group, tables)
    else:
        flat, slope = weight.contiguous().view(-1), gradient.contiguous().view(-1)
        moments = [(state[name].view(-1), state[name + "_scale"]) for name in ("exp_avg", "exp_avg_sq")]
        for start in range(0, flat.numel(), _CHUNK):
            end = min(start + _CHUNK, flat.numel())
            groups = slice(start // GROUP, -(-end // GROUP))
            mine = [(codes[start:end], scales[groups]) for codes, scales in moments]
            averages = (decode(*mine[0], tables[0]), decode(*mine[1], tables[1]))
            _adamw(flat[start:end], slope[start:end], averages, state["step"], group)
            for (codes, scales), value, table in zip(mine, averages, tables, strict=True):
                encode(value, codes, scales, table)
        if not weight.is_contiguous():
            weight.copy_(flat.view(weight.shape))
    # A second average that is tiny within its group must not become 0: the next step divides by it.
    state["exp_avg_sq"].clamp_(min=1)


def _update_by_kernel(
    weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], tables: list[Tensor]
) -> None:
    beta1, beta2 = group["betas"]
    torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
        "adam",
        gradient.contiguous(),
        weight,
        state["exp_avg"],
        state["exp_avg_sq"],
        beta1,
        beta2,
        0.0,  # beta3 and alpha, which another optimizer uses
        0.0,
        group["eps"],
        state["step"],
        group["lr"],
        *tables,
        state["exp_avg_scale"],
        state["exp_avg_sq_scale"],
        group["weight_decay"],
        1.0,  # gradients are clipped already
        False,
    )


def decode(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Codes uint8 (n,) and scales fp32 (n / 256,) -> values fp32 (n,)."""
    groups = pad(table[codes.int()], (0, -codes.numel() % GROUP)).view(-1, GROUP)
    return groups.mul_(scales.unsqueeze(1)).view(-1)[: codes.numel()]


def encode(values: Tensor, codes: Tensor, scales: Tensor, table: Tensor) -> None:
    """Values fp32 (n,): write the largest magnitude of each 256 into `scales`, the nearest entries of `table` into
    `codes`."""
    groups = pad(values, (0, -values.numel() % GROUP)).view(-1, GROUP)
    scales.copy_(groups.abs().amax(1))
    unit = groups / scales.masked_fill(scales == 0, 1).unsqueeze(1)
    nearest = torch.bucketize(unit.view(-1)[: values.numel()], (table[1:] + table[:-1]) / 2, out_int32=True)
    codes.copy_(nearest)


@cache
def _table(*, signed: bool) -> tuple[float, ...]:
    """The 256 numbers that codes stand for: 0, 1, and in each decade from 10^-6 to 1 the means of equal steps, twice as
    many as in the decade below. Dettmers 2016, 8-Bit Approximations for Parallelism in Deep Learning."""
    values = [0.0, 1.0]
    for decade in range(7):
        steps = 2 ** (decade if signed else decade + 1)
        edges = [0.1 + 0.9 * i / steps for i in range(steps + 1)]
        means = [10.0 ** (decade - 6) * (low + high) / 2 for low, high in pairwise(edges)]
        values += means
        if signed:
            values += [-mean for mean in means]
    return tuple(sorted(values))


_TABLES = [torch.tensor(_table(signed=signed)) for signed in (True, False)]

"""What `blocktrain calibrate` measures: the rates of this machine that the planner needs, in well under a minute.

This is the only file of the planner that imports PyTorch. Copies, files and matrix products are timed by `probe.py`;
here are the other kernels that a training step spends its time in, at sizes like those of a step. Each rate is a
median, so other work on the machine lowers it as it would slow down a step.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from blocktrain.plan.hardware import UPDATE_BYTES, Calibration, MeasuredRates
from blocktrain.probe import (
    TOKENS,
    Action,
    copy_rates,
    device_memory_bytes,
    file_rates,
    host_memory_bytes,
    matmul_rates,
    median_seconds,
    product_width,
    training_dtypes,
)
from blocktrain.runtime import environment, pick_device

TRIES = 7
SMALL_KERNELS = 200  # in one try


def measure(device: torch.device | None = None, *, tries: int | None = None, width: int = 512) -> Calibration:
    """Measure `device` (None: the first accelerator, or else the CPU).

    width: of the matrices on a CPU; on an accelerator it is at least 4096. The disk is the working folder's.
    """
    device, tries = device or pick_device(), tries or TRIES
    width = product_width(device, width)
    copies = copy_rates(device, tries=tries)
    files = file_rates(Path.cwd(), tries=min(tries, 3))
    updates = _update_scalars(device, tries)
    host_updates = updates if device.type == "cpu" else _update_scalars(torch.device("cpu"), tries)
    return Calibration(
        device=str(environment(device).get("device", device)),
        memory_bytes_total=float(device_memory_bytes(device) or host_memory_bytes()),
        rates=MeasuredRates(
            matmul_flops={
                dtype.itemsize: rate for dtype, rate in matmul_rates(device, width=width, tries=tries).items()
            },
            attention_flops={
                dtype.itemsize: _attention_flops(device, dtype, tries) for dtype in training_dtypes(device)
            },
            memory_bytes=_elementwise_bytes(device, width, tries),
            kernel_seconds=_small_kernel_seconds(device, tries),
            update_scalars=updates,
            host_link_bytes=copies["host copy" if device.type == "cpu" else "host to device"],
            host_memory_bytes=UPDATE_BYTES * host_updates,
            disk_bytes=files.get("disk write"),
        ),
        date=datetime.now(UTC).date().isoformat(),
    )


def _seconds(action: Action, device: torch.device, tries: int) -> float:
    return median_seconds({"action": action}, device, tries=tries)["action"]


def _attention_flops(device: torch.device, dtype: torch.dtype, tries: int) -> float:
    """Causal attention, forward and backward; the backward pass counts 2.5 times."""
    heads, seq, head = 8, 256, 64
    batch = TOKENS // seq
    q, k, v = (torch.randn(batch, heads, seq, head, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(q)

    def both_ways() -> None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, (q, k, v), gradient)

    return 3.5 * 4 * batch * heads * seq * seq * head / _seconds(both_ways, device, tries)


def _elementwise_bytes(device: torch.device, width: int, tries: int) -> float:
    """GELU as GPT-2 writes it, and a residual addition with its norm, forward and backward. The bytes are counted as in
    `operations.py`."""
    x = torch.randn(TOKENS, 4 * width, device=device, requires_grad=True)
    h = torch.randn(TOKENS, width, device=device, requires_grad=True)
    weight = torch.ones(width, device=device)
    wide, narrow = torch.randn_like(x), torch.randn_like(h)

    def both_ways() -> None:
        y = 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))
        torch.autograd.grad(y, x, wide)
        z = F.layer_norm(h + h, (width,), weight, weight)
        torch.autograd.grad(z, h, narrow)

    traffic_bytes = (18 * 4 * width + 5 * width) * TOKENS * 4 * 3  # once forward, twice backward
    return traffic_bytes / _seconds(both_ways, device, tries)


def _small_kernel_seconds(device: torch.device, tries: int) -> float:
    x = torch.ones(64, device=device)

    def many() -> Tensor:
        y = x
        for _ in range(SMALL_KERNELS):
            y = y + 1
        return y

    return _seconds(many, device, tries) / SMALL_KERNELS


def _update_scalars(device: torch.device, tries: int) -> float:
    """Fused AdamW, parameters per second."""
    parameters = [torch.zeros(1024, 1024, device=device, requires_grad=True) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    return sum(parameter.numel() for parameter in parameters) / _seconds(optimizer.step, device, tries)

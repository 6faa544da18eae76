"""`blocktrain calibrate`: what this machine achieves, measured in well under a minute. The only file here with PyTorch.

Each rate is that of the kernels a training step spends its time in, at sizes like its own, and the median of several
tries: other work on the machine then shows as a lower rate, which is what a step would see, too.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from blocktrain.plan.hardware import Calibration, Rates
from blocktrain.runtime import environment, pick_device, synchronize

TRIES = 7
TOKENS = 1024  # rows of the matrix products
PROBE_BYTES = 16 * 2**20


def measure(device: torch.device | None = None, *, tries: int | None = None, width: int = 512) -> Calibration:
    """All rates of `device` (None: the first accelerator, else the CPU). width: of the products on a CPU."""
    device = device or pick_device()
    if device.type != "cpu":
        width = max(width, 4096)
    clock = _Clock(device, tries or TRIES)
    dtypes = {4: torch.float32}
    if (device.type != "cpu" and torch.cuda.is_bf16_supported()) or device.type == "cpu":
        dtypes[2] = torch.bfloat16
    return Calibration(
        device=str(environment(device).get("device", device)),
        memory_bytes_total=float(_memory(device)),
        rates=Rates(
            matmul_flops={size: _products(clock, dtype, width) for size, dtype in dtypes.items()},
            attention_flops={size: _attention(clock, dtype) for size, dtype in dtypes.items()},
            memory_bytes=_elementwise(clock, width),
            kernel_seconds=_small_kernel(clock),
            update_scalars=_update(clock),
            host_link_bytes=_host_link(clock),
            peer_link_bytes=_host_link(clock),
            network_bytes=_host_link(clock),
            host_memory_bytes=_host_link(clock),
            disk_bytes=_disk(clock),
            kind="measured",
        ),
        date=datetime.now(UTC).date().isoformat(),
    )


class _Clock:
    """Median seconds of something on a device."""

    def __init__(self, device: torch.device, tries: int):
        self.device = device
        self.tries = tries

    def seconds(self, action: Callable[[], object]) -> float:
        action()
        times = []
        for _ in range(self.tries):
            synchronize(self.device)
            start = time.perf_counter()
            action()
            synchronize(self.device)
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _products(clock: _Clock, dtype: torch.dtype, width: int) -> float:
    """A layer's linear map up and down, forward and backward: six products."""
    up = torch.randn(4 * width, width, device=clock.device, dtype=dtype, requires_grad=True)
    down = torch.randn(width, 4 * width, device=clock.device, dtype=dtype, requires_grad=True)
    x = torch.randn(TOKENS, width, device=clock.device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(TOKENS, width, device=clock.device, dtype=dtype)

    def both_ways() -> None:
        y = F.linear(F.linear(x, up), down)
        torch.autograd.grad(y, (x, up, down), gradient)

    return 6 * 2 * TOKENS * 4 * width * width / clock.seconds(both_ways)


def _attention(clock: _Clock, dtype: torch.dtype) -> float:
    """Causal attention both ways; a forward pass and 2.5 of it for the backward pass."""
    heads, seq, head = 8, 256, 64
    batch = TOKENS // seq
    q, k, v = (
        torch.randn(batch, heads, seq, head, device=clock.device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn_like(q)

    def both_ways() -> None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, (q, k, v), gradient)

    return 3.5 * 4 * batch * heads * seq * seq * head / clock.seconds(both_ways)


def _elementwise(clock: _Clock, width: int) -> float:
    """GELU as GPT-2 writes it and a residual with its norm, both ways: bytes as `operations.py` counts them."""
    x = torch.randn(TOKENS, 4 * width, device=clock.device, requires_grad=True)
    h = torch.randn(TOKENS, width, device=clock.device, requires_grad=True)
    weight = torch.ones(width, device=clock.device)
    wide, narrow = torch.randn_like(x), torch.randn_like(h)

    def both_ways() -> None:
        y = 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))
        torch.autograd.grad(y, x, wide)
        z = F.layer_norm(h + h, (width,), weight, weight)
        torch.autograd.grad(z, h, narrow)

    moved = (18 * 4 * width + 5 * width) * TOKENS * 4 * 3  # once forward, twice backward
    return moved / clock.seconds(both_ways)


def _small_kernel(clock: _Clock) -> float:
    x = torch.ones(64, device=clock.device)

    def many() -> Tensor:
        y = x
        for _ in range(200):
            y = y + 1
        return y

    return clock.seconds(many) / 200


def _update(clock: _Clock) -> float:
    """Fused AdamW: parameters a second."""
    parameters = [torch.zeros(1024, 1024, device=clock.device, requires_grad=True) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    return sum(parameter.numel() for parameter in parameters) / clock.seconds(optimizer.step)


def _host_link(clock: _Clock) -> float:
    """Copying to the device; on a CPU, within the host."""
    block = torch.ones(PROBE_BYTES, dtype=torch.uint8)
    block = block.pin_memory() if clock.device.type == "cuda" else block
    target = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=clock.device)
    return PROBE_BYTES / clock.seconds(lambda: target.copy_(block))


def _disk(clock: _Clock) -> float:
    """Writing and flushing a file in the temporary folder; 0.1 GB/s where none can be written."""
    data = bytes(PROBE_BYTES)
    with suppress(OSError), tempfile.TemporaryDirectory(prefix="blocktrain-") as folder:
        path = Path(folder) / "probe"

        def write() -> None:
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        return PROBE_BYTES / clock.seconds(write)
    return 1e8

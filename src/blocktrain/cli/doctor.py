"""`blocktrain doctor`: what this machine has, as far as training in blocks cares, each figure measured now."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from blocktrain.runtime import available_memory_bytes, environment, pick_device, synchronize
from blocktrain.units import format_bytes

PACKAGES = ("torch", "transformers", "safetensors", "pyarrow", "numpy", "rich", "datasets", "pillow")
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
PROBE_BYTES = 64 * 2**20


def doctor(options: argparse.Namespace) -> int:
    """Print versions, devices, dtypes with a matrix product, and bandwidths (medians)."""
    device = pick_device()
    findings = {
        "environment": environment(device),
        "packages": {name: _version(name) for name in PACKAGES},
        "dtypes": {name: _multiplies(getattr(torch, name), device) for name in DTYPES},
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "available_memory_bytes": available_memory_bytes(),
        "device_memory_bytes": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "bytes_per_second": _bandwidths(device),
        "matmul_flops_per_second": _matmul_rate(device),
    }
    if options.json:
        json.dump(findings, sys.stdout, indent=1)
        print()
    else:
        _show(findings)
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a matrix product and its result exist for this dtype on this device."""
    try:
        a = torch.ones(16, 16, device=device).to(dtype)
        return bool(torch.isfinite((a @ a).float()).all())
    except (RuntimeError, TypeError):
        return False


def _median_seconds(action, device: torch.device, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _bandwidths(device: torch.device) -> dict[str, float]:
    """Bytes per second of a host copy, of writing and reading a file in the working folder, and to the device."""
    block = torch.ones(PROBE_BYTES, dtype=torch.uint8)
    target = torch.empty_like(block)
    rates = {"host copy": PROBE_BYTES / _median_seconds(lambda: target.copy_(block), device)}
    if device.type != "cpu":
        pinned = block.pin_memory()
        rates["host to device, pinned"] = PROBE_BYTES / _median_seconds(lambda: pinned.to(device), device)
    if not os.access(Path.cwd(), os.W_OK):  # no disk to measure
        return rates
    data = block.numpy().tobytes()
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".blocktrain-doctor-") as folder:
        path = Path(folder) / "probe"

        def write() -> None:
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        rates["disk write, flushed"] = PROBE_BYTES / _median_seconds(write, device, 3)
        rates["disk read, from the page cache"] = PROBE_BYTES / _median_seconds(path.read_bytes, device)
    return rates


def _matmul_rate(device: torch.device) -> float:
    """FLOPs per second of a large matrix product in the dtype training computes with."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.ones(size, size, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    return 2 * size**3 / _median_seconds(lambda: a @ a, device)


def _show(findings: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in findings["environment"].items():
        table.add_row(name, str(value if value is not None else "unknown"))
    for name, value in findings["packages"].items():
        table.add_row(name, value or "[dim]not installed[/dim]")
    table.add_row("dtypes", ", ".join(name for name, works in findings["dtypes"].items() if works))
    available = format_bytes(findings["available_memory_bytes"])
    table.add_row("host memory", f"{format_bytes(findings['host_memory_bytes'])}, {available} available")
    if findings["device_memory_bytes"] is not None:
        table.add_row("device memory", format_bytes(findings["device_memory_bytes"]))
    for name, rate in findings["bytes_per_second"].items():
        table.add_row(name, f"{rate / 1e9:.2f} GB/s")
    table.add_row("matrix product", f"{findings['matmul_flops_per_second'] / 1e12:.3f} TFLOP/s")
    Console().print(table)

"""`blocktrain doctor`: what this machine has that matters for training in blocks; every rate is measured now."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from blocktrain.probe import copy_rates, device_memory_bytes, file_rates, host_memory_bytes, matmul_rates, multiplies
from blocktrain.runtime import available_memory_bytes, environment, pick_device
from blocktrain.units import format_bytes

PACKAGES = ("torch", "transformers", "safetensors", "pyarrow", "numpy", "rich", "datasets", "pillow")
PROBED_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")


def doctor(options: argparse.Namespace) -> int:
    """Print versions, devices, dtypes that have a matrix product, and rates. The disk is the working folder's."""
    device = pick_device()
    findings = {
        "environment": environment(device),
        "packages": {name: _version(name) for name in PACKAGES},
        "dtypes": {name: multiplies(getattr(torch, name), device) for name in PROBED_DTYPES},
        "host_memory_bytes": host_memory_bytes(),
        "available_memory_bytes": available_memory_bytes(),
        "device_memory_bytes": device_memory_bytes(device),
        "bytes_per_second": {**copy_rates(device), **file_rates(Path.cwd())},
        "matmul_flops_per_second": {
            str(dtype).removeprefix("torch."): rate for dtype, rate in matmul_rates(device).items()
        },
    }
    if options.json:
        print(json.dumps(findings, indent=1))
    else:
        _show(findings)
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(findings: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in findings["environment"].items():
        table.add_row(name, str(value if value is not None else "unknown"))
    for name, value in findings["packages"].items():
        if name not in findings["environment"]:
            table.add_row(name, value or "[dim]not installed[/dim]")
    table.add_row("dtypes", ", ".join(name for name, works in findings["dtypes"].items() if works))
    available = format_bytes(findings["available_memory_bytes"])
    table.add_row("host memory", f"{format_bytes(findings['host_memory_bytes'])}, {available} available")
    if findings["device_memory_bytes"] is not None:
        table.add_row("device memory", format_bytes(findings["device_memory_bytes"]))
    for name, rate in findings["bytes_per_second"].items():
        table.add_row(name, f"{rate / 1e9:.2f} GB/s")
    for name, rate in findings["matmul_flops_per_second"].items():
        table.add_row(f"matrix products, {name}", f"{rate / 1e12:.3f} TFLOP/s")
    Console().print(table)

"""`blocktrain calibrate`: measure this machine, and store its rates for `plan --gpu this-machine`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from rich.console import Console

from blocktrain.errors import storage_errors
from blocktrain.plan.calibrate import measure
from blocktrain.plan.hardware import Calibration, calibration_file


def calibrate(options: argparse.Namespace) -> int:
    """Measure, store and print."""
    found = measure()
    path = calibration_file()
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    if options.json:
        json.dump({**asdict(found), "stored": str(path)}, sys.stdout, indent=1)
        print()
        return 0
    console = Console()
    for name, value in _rows(found):
        console.print(f"{name:22} {value}", highlight=False)
    console.print(f"\nStored in {path}. To plan with these rates: blocktrain plan --gpu this-machine ...",
                  highlight=False, soft_wrap=True)  # fmt: skip
    return 0


def _rows(found: Calibration) -> list[tuple[str, str]]:
    rates, dtypes = found.rates, {4: "fp32", 2: "bf16"}
    link = "copy within the host" if found.device == "cpu" else "host to device"
    disk = "not measured" if rates.disk_bytes is None else f"{rates.disk_bytes / 1e9:.2f} GB/s"
    return [
        ("device", found.device),
        *(
            (f"matrix products, {dtypes[size]}", f"{rate / 1e9:.1f} GFLOP/s")
            for size, rate in rates.matmul_flops.items()
        ),
        *((f"attention, {dtypes[size]}", f"{rate / 1e9:.1f} GFLOP/s") for size, rate in rates.attention_flops.items()),
        ("elementwise kernels", f"{rates.memory_bytes / 1e9:.2f} GB/s"),
        ("a small kernel", f"{rates.kernel_seconds * 1e6:.1f} us"),
        ("AdamW, fused", f"{rates.update_scalars / 1e6:.0f} M parameters/s"),
        ("AdamW on the host", f"{rates.host_memory_bytes / 1e9:.2f} GB/s"),
        (link, f"{rates.host_link_bytes / 1e9:.2f} GB/s"),
        ("disk write", disk),
    ]

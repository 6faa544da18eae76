"""`blocktrain calibrate`: measure this machine, and store its rates for `plan --gpu this-machine`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console

from blocktrain.outputs import write_output
from blocktrain.plan.calibrate import measure
from blocktrain.plan.hardware import calibration_file


def calibrate(options: argparse.Namespace) -> int:
    """Measure, store and print."""
    found = measure()
    path = calibration_file()
    write_output(path, json.dumps(asdict(found), indent=1) + "\n")
    if options.json:
        print(json.dumps({**asdict(found), "stored": str(path)}, indent=1))
        return 0
    rates, rows = found.rates, {"device": found.device}
    for what, flops in (("matrix products", rates.matmul_flops), ("attention", rates.attention_flops)):
        for size, rate in flops.items():
            rows[f"{what}, {'fp32' if size == 4 else 'bf16'}"] = f"{rate / 1e9:.1f} GFLOP/s"
    link = "copy within the host" if found.device == "cpu" else "host to device"
    rows |= {
        "elementwise kernels": f"{rates.memory_bytes / 1e9:.2f} GB/s",
        "a small kernel": f"{rates.kernel_seconds * 1e6:.1f} us",
        "AdamW, fused": f"{rates.update_scalars / 1e6:.0f} M parameters/s",
        "AdamW on the host": f"{rates.host_memory_bytes / 1e9:.2f} GB/s",
        link: f"{rates.host_link_bytes / 1e9:.2f} GB/s",
        "disk write": "not measured" if rates.disk_bytes is None else f"{rates.disk_bytes / 1e9:.2f} GB/s",
    }
    console = Console()
    for name, value in rows.items():
        console.print(f"{name:22} {value}", highlight=False)
    stored = f"\nStored in {path}. To plan with these rates: blocktrain plan --gpu this-machine ..."
    console.print(stored, highlight=False, soft_wrap=True)
    return 0

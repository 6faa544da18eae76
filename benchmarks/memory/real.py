"""Is the accounted peak the real one? Real tensors, and the growth of the process's resident set beside them.

    python benchmarks/memory/real.py [--out benchmarks/memory/real.json]

A GPT-2 of 300 M parameters in eight blocks, one visit to each; a process of its own for each precision. The allocator
is told to hand freed memory back at once (glibc's MALLOC_MMAP_THRESHOLD_), for the resident set must not remember what
was freed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import blocktrain as bt
from blocktrain.optim.precision import PRESETS
from blocktrain.runtime import environment, pick_device, result_path
from blocktrain.train.predict_memory import StepShape, predicted_peaks, visited_peaks

LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS, BLOCKS = 20, 1088, 17, 16384, 256, 8
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


def resident_bytes(key: str) -> int:
    """`VmRSS` now, or `VmHWM`, the most since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}: this needs Linux")


def in_own_process(script: str, *arguments: str) -> dict[str, Any]:
    """What `script --one ARGUMENTS` prints last, run in a process that hands freed memory back at once."""
    command = [sys.executable, script, "--one", *arguments]
    done = subprocess.run(command, env={**os.environ, **ALLOCATOR}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(precision: str) -> dict[str, Any]:
    """One process's result: predicted, tracked on real tensors, and resident. Libraries are loaded before the clock."""
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    step = StepShape(loss=lambda model: model(input_ids=tokens, labels=tokens).loss, inputs=[tokens])
    list(visited_peaks(_optimizer(layers=1, width=64, blocks=2, precision=precision), step))
    gc.collect()
    before = resident_bytes("VmRSS")
    optimizer = _optimizer(layers=LAYERS, width=WIDTH, blocks=BLOCKS, precision=precision)
    predicted = predicted_peaks(optimizer, step)
    forget_peak()
    tracked = list(visited_peaks(optimizer, step))
    resident = resident_bytes("VmHWM") - before
    on_host = max(peak.bytes + peak.host_bytes for peak in tracked)  # one memory here
    return {
        "precision": precision,
        "parameters": optimizer.partition.num_parameters,
        "predicted_bytes": max(peak.bytes + peak.host_bytes for peak in predicted),
        "tracked_bytes": on_host,
        "resident_growth_bytes": resident,
        "accounted_over_resident": round(on_host / resident, 4),
        "parts": max(tracked, key=lambda peak: peak.bytes).parts,
    }


def _optimizer(*, layers: int, width: int, blocks: int, precision: str) -> bt.BlockOptimizer:
    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=VOCABULARY, n_positions=TOKENS, **none
    )
    partition = bt.partition(GPT2LMHeadModel(config), num_blocks=blocks)
    return bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-4, fused=True, precision=PRESETS[precision])


def main() -> None:
    """Measure each precision in a process of its own, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="*", choices=[*PRESETS], default=["fp32", "bf16-exact"])
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("real.json")))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    rows = []
    print("| precision | predicted MiB | tracked MiB | resident growth MiB | tracked over resident |")
    print("|---" * 5 + "|")
    for precision in options.precision:
        row = in_own_process(__file__, precision)
        rows.append(row)
        sizes = " | ".join(
            f"{row[key] / 2**20:.0f}" for key in ("predicted_bytes", "tracked_bytes", "resident_growth_bytes")
        )
        print(f"| {precision} | {sizes} | {row['accounted_over_resident']:.3f} |", flush=True)
    result = {
        "question": "accounted peak beside the growth of the resident set",
        "model": f"GPT-2, {LAYERS} layers, {WIDTH} wide, vocabulary {VOCABULARY}, {BLOCKS} blocks, 1 x {TOKENS} tokens",
        "allocator": ALLOCATOR,
        "rows": rows,
        "environment": environment(pick_device("cpu")),
        "date": datetime.now(UTC).date().isoformat(),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

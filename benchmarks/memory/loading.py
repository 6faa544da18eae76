"""Does a run take more memory than its plan, loading included? Real tensors, and the process's resident set.

    python benchmarks/memory/loading.py [--precision nf4] [--out benchmarks/memory/loading.json]

A Llama of 300 M parameters is saved in bf16. A process of its own then loads it through `blocktrain.run`, trains two
visits of two steps each and writes a checkpoint. Both memories of the plan, device and host, are this machine's one.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from real import ALLOCATOR, forget_peak, in_own_process, resident_bytes
from transformers import LlamaConfig, LlamaForCausalLM

import blocktrain as bt
from blocktrain.records.run_records import MemoryPeaks
from blocktrain.runtime import environment, pick_device, result_path
from blocktrain.train.config import RunConfig

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 16384,
    "max_position_embeddings": 128,
}
LAYERS, TOKENS, BLOCKS = 21, 128, 8


def save_model(folder: Path, layers: int) -> int:
    """Write a model of random bf16 weights; returns how many parameters it has."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES)).to(torch.bfloat16)  # pyright: ignore
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def train(model: Path, folder: Path, precision: str) -> int:
    """A run of two visits; returns the bytes that its records predict, on device and host together."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    config = RunConfig.from_mapping(
        {
            "name": "loading",
            "device": "cpu",
            "precision": precision,
            "text": {
                "source": str(folder / "text.txt"), "row_tokens": TOKENS, "tokenizer": "bytes", "cache": str(folder)
            },
            "model": {"path": str(model)},
            "blocks": {"count": BLOCKS},
            "schedule": {"visit": "2 steps", "sweeps": 1},
            "stop": {"duration": "4 steps"},
            "optimizer": {"name": "AdamW", "lr": 1e-4, "state": "drop"},
            "batch": {"rows": 1},
            "evaluation": {"rows": 1, "batch_rows": 1},
        }
    )  # fmt: skip
    peaks: list[int] = []

    def listen(record: object) -> None:
        if isinstance(record, MemoryPeaks):
            peaks.extend(sum(peak.parts.values()) + peak.host_bytes for peak in record.blocks[:2])

    bt.run(config, folder / "run", listeners=[listen])
    return max(peaks)


def measure(precision: str, model: Path) -> dict[str, Any]:
    """One process's result. A run of a smaller model loads all libraries before the clock."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "tiny", layers=BLOCKS)
        (Path(folder) / "first").mkdir()
        train(Path(folder) / "tiny", Path(folder) / "first", precision)
        gc.collect()
        before = resident_bytes("VmRSS")
        forget_peak()
        planned = train(model, Path(folder), precision)
        growth = resident_bytes("VmHWM") - before
    return {
        "precision": precision,
        "idle_bytes": before,
        "planned_bytes": planned,
        "resident_growth_bytes": growth,
        "resident_over_planned": round(growth / planned, 3),
    }


def main() -> None:
    """Measure each precision in a process of its own, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="*", default=["nf4"])
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("loading.json")))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], Path(options.one[1]))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        parameters = save_model(Path(folder), LAYERS)
        for precision in options.precision:
            rows.append(in_own_process(__file__, precision, folder))
            print(rows[-1], flush=True)
    result = {
        "question": "the resident set of a run, loading included, beside its plan",
        "model": f"Llama, {parameters} parameters, {BLOCKS} blocks, 1 x {TOKENS} tokens, saved in bf16",
        "allocator": ALLOCATOR,
        "rows": rows,
        "environment": environment(pick_device("cpu")),
        "date": datetime.now(UTC).date().isoformat(),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

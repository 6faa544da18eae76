"""Does a run have the same losses, whatever it is spread over? Every layout, with and without stored prefixes.

    python benchmarks/distributed/same.py [--out benchmarks/distributed/same.json]

Each run is trained whole by the trainer, in fp32, on 1, 2 and 4 processes (gloo, CPU). What is told is the largest
difference from the run of one process over all steps and evaluations, relative to the loss. A cached run is also told
from its uncached one: stored states change nothing.

Sums in another order differ by 2^-24 = 6e-8 of the value, and AdamW divides by a gradient's own size, so a weight whose
gradient is nothing but rounding moves by the full rate. `TOLERANCE` leaves room for that over the run's steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import blocktrain as bt
from blocktrain.records.log import Event, read_events
from blocktrain.runtime import environment, result_path
from blocktrain.testing import run_distributed

TOLERANCE = 5e-6
LAYERS, WIDTH, BLOCKS, ROWS, TOKENS = 16, 32, 2, 8, 32
SIZES = (1, 2, 4)

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **{"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 2, "n_positions": TOKENS},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    },
    "llama": {
        **{"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": TOKENS},
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "contiguous blocks, 1f1b": {"distributed": {"layout": "pipeline"}},
    "contiguous blocks, gpipe": {"distributed": {"layout": "pipeline", "pipeline": "gpipe"}},
    "contiguous blocks, interleaved": {"distributed": {"layout": "pipeline", "pipeline": "interleaved"}},
    "two pieces of each block, 1f1b": {"distributed": {"layout": "pipeline"}, "stages": 2},
    "four pieces of each block, 1f1b": {"distributed": {"layout": "pipeline"}, "stages": 4},
    "fsdp": {"distributed": {"layout": "fsdp"}},
}
PREFIX: dict[str, dict[str, Any]] = {
    "uncached": {"store": "off"},
    "cached": {"store": "host"},
    "cached, in files, ahead": {"store": "file", "fill": "ahead", "fill_rows": 3},
}


def name_of(model: str, layout: str, prefix: str) -> str:
    """Of a run, and of its folder."""
    return f"{model}, {layout}, {prefix}"


def sizes_of(layout: str) -> tuple[int, ...]:
    """On how many processes it can run: as many as there are pieces, and on one, which has all of them."""
    pieces = LAYOUTS[layout].get("stages")
    return (1, pieces) if pieces else SIZES


def config(model: str, layout: str, prefix: str) -> dict[str, Any]:
    """A sweep over blocks, each of whose visits goes through its subset twice."""
    chosen = dict(LAYOUTS[layout])
    return {
        "device": "cpu",
        "text": {"source": "stdlib", "tokenizer": "bytes", "row_tokens": TOKENS},
        "sampling": {"scope": "sweep", "rate": 0.0003},
        "model": {"architecture": model, "config": MODELS[model]},
        "blocks": {"count": BLOCKS, "stages": chosen.pop("stages", 1)},
        "schedule": {"visit": "2 epochs", "sweeps": 1},
        "optimizer": {"name": "AdamW", "lr": 1e-3, "max_grad_norm": 1.0},
        "batch": {"rows": ROWS, "micro_rows": 2},
        "evaluation": {"every": "20 steps", "rows": 16},
        "checkpoint": {"every": "1000 steps", "keep": 1},
        "prefix": PREFIX[prefix],
        **chosen,
    }


def train(folder: str, size: int) -> None:
    """Every run, on one process."""
    for model in MODELS:
        for layout in (layout for layout in LAYOUTS if size in sizes_of(layout)):
            for prefix in PREFIX:
                mapping = config(model, layout, prefix)
                bt.run(bt.RunConfig.from_mapping(mapping), Path(folder) / name_of(model, layout, prefix))


def losses(run: Path) -> list[float]:
    """Of all steps, then of all evaluations."""
    return [event["loss"] for kind in ("step", "evaluation") for event in events_of(run, kind)]


def events_of(run: Path, kind: str) -> list[Event]:
    """Those of a kind in the run's log."""
    return [event for event in read_events(run / "events.jsonl") if event["kind"] == kind]


def difference(one: list[float], other: list[float]) -> float:
    """The largest, relative to the loss."""
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def compared(folders: dict[int, Path]) -> list[dict[str, Any]]:
    """A row for each run."""
    rows = []
    for model in MODELS:
        for layout in LAYOUTS:
            for prefix in PREFIX:
                name = name_of(model, layout, prefix)
                sizes, uncached = sizes_of(layout), name_of(model, layout, "uncached")
                found = {size: losses(folders[size] / name) for size in sizes}
                plain = {size: losses(folders[size] / uncached) for size in sizes}
                done = events_of(folders[sizes[-1]] / name, "cached")
                rows.append(
                    {
                        "model": model,
                        "layout": layout,
                        "prefix": prefix,
                        "steps": len(events_of(folders[1] / name, "step")),
                        "from_one_process": {size: difference(found[1], found[size]) for size in sizes[1:]},
                        "from_uncached": {size: difference(plain[size], found[size]) for size in sizes},
                        "rows_read": sum(event["hits"] for event in done),
                        "rows_computed": sum(event["computed"] for event in done),
                    }
                )
    return rows


def main() -> None:
    """Train, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("same.json")))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folders = {size: Path(place) / str(size) for size in SIZES}
        for size, folder in folders.items():
            run_distributed(train, size, str(folder), size, timeout_seconds=900, patience_seconds=3600)
        rows = compared(folders)
    for row in rows:
        print(
            f"{name_of(row['model'], row['layout'], row['prefix']):60} {row['from_one_process']} {row['from_uncached']}"
        )
    told = {
        "question": "the largest relative difference of a loss from one process's, and from the uncached run's",
        "model": f"{LAYERS} layers, {WIDTH} wide, {BLOCKS} blocks, {ROWS} x {TOKENS} bytes a step, fp32, AdamW at 1e-3",
        "tolerance": TOLERANCE,
        "within": all(value <= TOLERANCE for row in rows for value in row["from_one_process"].values()),
        "date": datetime.now(UTC).date().isoformat(),
        "environment": environment(torch.device("cpu")),
        "runs": rows,
    }
    options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

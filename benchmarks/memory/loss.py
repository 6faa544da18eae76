"""What do packed frozen weights and 8-bit moments cost in loss? A small GPT-2 on the quickstart's text, 300 steps.

    python benchmarks/memory/loss.py [--steps 300] [--out benchmarks/memory/loss.json]

Each precision trains the same model (4 layers, 128 wide) on the same rows in the same order, one seed, 50
steps a visit. `loss` is the validation loss of the model as it rests when the last visit is over (all weights packed);
`loss_of_masters` that of the fp32 weights that training arrived at and `blocktrain export` writes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import blocktrain as bt
from blocktrain.chain.freezing import evaluating
from blocktrain.chain.model_loading import ModelConfig
from blocktrain.records.log import read_events
from blocktrain.runtime import environment, pick_device, result_path
from blocktrain.train.context import build
from blocktrain.train.evaluate import score
from blocktrain.train.export import export
from blocktrain.train.run_folder import RunFolder

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
RUNS = {
    "fp32": [],
    "bf16-exact": ["precision=bf16-exact"],
    "int8": ["precision=int8"],
    "nf4": ["precision=nf4"],
    "bf16-exact, 8-bit moments": ["precision=bf16-exact", "optimizer.moments=8bit"],
    "bf16": ["precision=bf16"],
}


def train(steps: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    """One run: its validation losses at the end."""
    common = [
        "model.config.n_layer=4",
        "model.config.n_embd=128",
        "model.config.n_head=4",
        "batch.rows=8",
        "optimizer.lr=1e-3",
        f"stop.duration={steps} steps",
        "schedule.visit=50 steps",
        "schedule.sweeps=100",
        f"evaluation.every={2 * steps} steps",  # the last one, between visits, is always made
        f"checkpoint.every={2 * steps} steps",
    ]
    run = bt.run(bt.RunConfig.load(QUICKSTART, [*common, *overrides]), folder)
    end = next(event for event in read_events(run.events) if event["kind"] == "end")
    return {"loss": end["loss"], "loss_of_masters": loss_of_export(run), "seconds": end["seconds"]}


def loss_of_export(run: RunFolder) -> float:
    """Validation loss, in fp32, of the model that `blocktrain export` writes."""
    out = export(run, run.path / "exported")
    config = run.config()
    context = build(replace(config, precision="fp32", model=ModelConfig(path=str(out))), run.path)
    settings = config.evaluation
    with evaluating(context.model):
        scored = score(
            context.data, context.model, rows=settings.rows, batch_rows=context.evaluation_rows, device=context.device
        )
    return scored.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", choices=RUNS, nargs="*", default=list(RUNS))
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("loss.json")))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    contents: dict[str, Any] = {
        "steps": arguments.steps,
        "results": {},
        "environment": environment(pick_device("cpu")),
        "date": datetime.now(UTC).date().isoformat(),
    }
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(arguments.only):
            contents["results"][name] = train(arguments.steps, RUNS[name], Path(folder) / str(number))
            arguments.out.write_text(json.dumps(contents, indent=1) + "\n")


if __name__ == "__main__":
    main()

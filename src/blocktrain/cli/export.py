"""`blocktrain export DIR OUT`: write the trained model as a Hugging Face folder, and upload it on request."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from blocktrain.cli.command import Command, add_run_folder
from blocktrain.parse import output_path

if TYPE_CHECKING:
    from blocktrain.train.export import ExportDtype
    from blocktrain.train.run_folder import RunFolder

# How the name of a transformers model ends -> the class that loads it
LOADERS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForImageClassification": "AutoModelForImageClassification",
}


def export(options: argparse.Namespace) -> int:
    """Write the folder with its model card, and push it to the hub with `--push`."""
    from blocktrain.cli.live import quiet_libraries
    from blocktrain.integrations.hub import check_repository, push
    from blocktrain.train.run_folder import RunFolder

    if options.push is not None:
        check_repository(options.push)
    quiet_libraries()
    folder = RunFolder(options.run)
    step, said = export_run(
        folder, options.out, checkpoint=options.checkpoint, dtype=options.dtype, accepts_nonfinite=options.force
    )
    address = None if options.push is None else push(options.out, options.push, public=options.public)
    if options.json:
        print(json.dumps({"exported": str(options.out.resolve()), "step": step, "pushed": address}))
        return 0
    print(said)
    if address is not None:
        print(f"pushed to {address}")
    return 0


def export_run(
    folder: RunFolder,
    out: Path,
    *,
    checkpoint: str = "newest",
    dtype: ExportDtype | None = None,
    accepts_nonfinite: bool = False,
) -> tuple[int, str]:
    """Write the model of a run with its card to `out`; returns the step, and in words what was written and how to load
    it."""
    from blocktrain.integrations.card import write_card
    from blocktrain.train.checkpoint import find_checkpoint, read_header
    from blocktrain.train.export import export as export_model

    folder.require_resumable()
    progress = read_header(find_checkpoint(folder.checkpoints, checkpoint)).progress
    step = str(progress.step)  # of the checkpoint that was found
    out = export_model(
        folder,
        out,
        checkpoint=step,
        dtype=dtype,
        accepts_nonfinite=accepts_nonfinite,
        also=lambda place: write_card(folder, place, step),
    )
    saved = json.loads((out / "config.json").read_text())
    (name,) = saved.get("architectures") or [None]
    if name is None:
        how = "its weights are in model.safetensors, its depth in config.json: see blocktrain.resnet"
    else:
        loader = next((loader for end, loader in LOADERS.items() if name.endswith(end)), name)
        how = f"load it with {loader}.from_pretrained({str(out)!r})"
    dtype_saved = f" in {saved['dtype']}" if "dtype" in saved else ""
    loss = f" (validation loss {progress.score['loss']:.4f})" if progress.evaluated == progress.step else ""
    said = f"exported step {progress.step}{loss} to {out}{dtype_saved}; {how}"
    if checkpoint == "best" and progress.best.get("loss", math.inf) < progress.score["loss"]:
        said += (
            f"\nThe lowest validation loss was {progress.best['loss']:.4f} at step {progress.best['step']:.0f}, where "
            "no checkpoint was written; to have one there, set stop.patience, or checkpoint.every = evaluation.every"
        )
    return progress.step, said


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_run_folder(parser)
    parser.add_argument("out", type=output_path, metavar="OUT", help="a new folder")
    parser.add_argument(
        "--checkpoint",
        default="newest",
        metavar="WHICH",
        help="newest, best (the lowest validation loss), or the number of a step (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="dtype of the weights (default: that of the weights at model.path, fp32 for a model that began at random "
        "ones; fp32 is bit for bit what training arrived at)",
    )
    parser.add_argument(
        "--force", action="store_true", help="export even if the last validation loss or a weight is not finite"
    )
    parser.add_argument("--push", metavar="OWNER/NAME", help="then upload it to the Hugging Face hub")
    parser.add_argument(
        "--public", action="store_true", help="if --push creates the repository, make it public (default: private)"
    )


EXPORT = Command(
    name="export", help="write the trained model as a Hugging Face folder", add_options=_add_options, run=export
)

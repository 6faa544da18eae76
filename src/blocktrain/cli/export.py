"""`blocktrain export DIR OUT`: write the trained model as a Hugging Face folder, and upload it on request."""

from __future__ import annotations

import argparse
import json

from blocktrain.cli.command import Command, add_run_folder
from blocktrain.parse import output_path

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
    from blocktrain.integrations.card import write_card
    from blocktrain.integrations.hub import check_repository, push
    from blocktrain.train.export import export as export_run
    from blocktrain.train.run_folder import RunFolder

    if options.push is not None:
        check_repository(options.push)
    quiet_libraries()
    folder = RunFolder(options.run)
    out = export_run(
        folder,
        options.out,
        dtype=options.dtype,
        accepts_nonfinite=options.force,
        also=lambda place: write_card(folder, place),
    )
    address = None if options.push is None else push(out, options.push, public=options.public)
    if options.json:
        print(json.dumps({"exported": str(out), "pushed": address}))
        return 0
    saved = json.loads((out / "config.json").read_text())
    (name,) = saved.get("architectures") or [None]
    if name is None:
        how = "its weights are in model.safetensors, its depth in config.json: see blocktrain.resnet"
    else:
        loader = next((loader for end, loader in LOADERS.items() if name.endswith(end)), name)
        how = f"load it with {loader}.from_pretrained({str(out)!r})"
    dtype = f" in {saved['dtype']}" if "dtype" in saved else ""
    print(f"exported to {out}{dtype}; {how}")
    if address is not None:
        print(f"pushed to {address}")
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_run_folder(parser)
    parser.add_argument("out", type=output_path, metavar="OUT", help="a new folder")
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

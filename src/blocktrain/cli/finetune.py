"""`blocktrain finetune MODEL DATA`: choose a configuration for a model, data and this machine, train, and export."""

from __future__ import annotations

import argparse

from blocktrain.cli.command import Command, add_overrides
from blocktrain.parse import number_between, output_path

EXPORTED = "model"  # the folder of a run that the trained model is exported to
METHODS = ("blocks", "full", "lora")


def finetune(options: argparse.Namespace) -> int:
    """Say what was chosen, train to the end, write the report, and export to the folder `model` of the run."""
    import shlex

    from rich.console import Console

    from blocktrain.cli.export import export_run
    from blocktrain.cli.live import quiet_libraries
    from blocktrain.cli.session import command_line, listening, numbered_folder, print_config, show_end
    from blocktrain.errors import ConfigError, Interrupted
    from blocktrain.train.finetune import finetuning
    from blocktrain.train.run import run
    from blocktrain.train.run_folder import RunFolder
    from blocktrain.units import parse_bytes, parse_tokens

    if options.method == "lora":
        raise ConfigError(
            "--method lora trains an adapter, and finetune trains every weight; 'blocktrain compare' has LoRA as a "
            "method of the repository's experiments/ (docs/comparing.md)"
        )
    quiet_libraries()
    if options.out is not None:
        RunFolder(options.out).require_new()
        if (options.out / EXPORTED).exists():
            raise ConfigError(f"'{options.out / EXPORTED}' exists already; choose another --out")
    chosen = finetuning(
        options.model,
        options.data,
        method=options.method,
        epochs=options.epochs,
        max_tokens=None if options.max_tokens is None else parse_tokens(options.max_tokens),
        memory=None if options.memory is None else parse_bytes(options.memory),
        overrides=options.overrides,
    )
    console = Console(stderr=options.json or options.print_config)
    for line in chosen.lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if options.print_config:
        print_config(chosen.config, as_json=options.json)
        return 0
    folder = RunFolder(options.out or numbered_folder(chosen.config.name))
    out = folder.path / EXPORTED
    try:
        with listening(chosen.config, folder.path, options) as listeners:
            method = "full" if options.method == "full" else "bcd"
            run(chosen.config, folder.path, method=method, listeners=listeners, command=command_line())
    except Interrupted as stop:
        then = f"blocktrain export {shlex.quote(str(folder.path))} {shlex.quote(str(out))}"
        raise Interrupted(f"{stop}, and then: {then}", signal_number=stop.exit_code - 128) from None
    show_end(folder, options)
    _, said = export_run(folder, out)
    console.print(f"\n{said}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder that from_pretrained loads, or a name on the hub")
    parser.add_argument(
        "data", metavar="DATA", help="a file, a folder, a data set saved to disk, or owner/name on the hub"
    )
    parser.add_argument("--out", type=output_path, metavar="DIR", help="a new folder (default: runs/MODEL-DATA)")
    parser.add_argument("--method", choices=METHODS, default="blocks", help="how to train (default: %(default)s)")
    parser.add_argument(
        "--epochs",
        type=number_between("--epochs", float, 0.001, 1e6),
        default=3.0,
        metavar="N",
        help="passes over the data (default: %(default)g)",
    )
    parser.add_argument("--max-tokens", metavar="10M", help="stop after so many tokens")
    parser.add_argument("--memory", metavar="24GB", help="plan for so much device memory instead of what is free")
    parser.add_argument("--print-config", action="store_true", help="print the configuration as TOML, and do not train")
    add_overrides(parser, "override a key of the configuration; may be repeated")


FINETUNE = Command(
    name="finetune",
    help="fine-tune a model on your data: choose everything for this machine, train, export",
    add_options=_add_options,
    run=finetune,
    trains=True,
)

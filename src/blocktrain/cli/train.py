"""`blocktrain train CONFIG`: train as a configuration says, into a new run folder."""

from __future__ import annotations

import argparse

from blocktrain.cli.command import Command, add_configuration


def train(options: argparse.Namespace) -> int:
    """Train to the end, then write the report and print the table."""
    from blocktrain.cli.live import quiet_libraries
    from blocktrain.cli.session import command_line, listening, load_config, numbered_folder, print_config, show_end
    from blocktrain.train.config import RunConfig
    from blocktrain.train.run import run

    if options.print_config:
        print_config(RunConfig.load(options.config, options.overrides), as_json=options.json)
        return 0
    quiet_libraries()
    config = load_config(options)
    out = options.out or numbered_folder(config.name)
    with listening(config, out, options) as listeners:
        folder = run(config, out, listeners=listeners, command=command_line())
    show_end(folder, options)
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_configuration(parser)
    parser.add_argument(
        "--print-config", action="store_true", help="print the configuration with every key as TOML, and do not train"
    )


TRAIN = Command(
    name="train",
    help="train as a configuration says, into a new run folder",
    add_options=_add_options,
    run=train,
    trains=True,
)

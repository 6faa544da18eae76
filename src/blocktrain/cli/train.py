"""`blocktrain train CONFIG`: train as a configuration says, into a new run folder."""

from __future__ import annotations

import argparse

from blocktrain.cli.command import Command, add_configuration


def train(options: argparse.Namespace) -> int:
    """Train to the end, then write the report and print the table."""
    from blocktrain.cli.live import quiet_libraries
    from blocktrain.cli.session import command_line, listening, numbered_folder, show_end
    from blocktrain.train.config import RunConfig
    from blocktrain.train.run import run

    quiet_libraries()
    config = RunConfig.load(options.config, options.overrides)
    out = options.out or numbered_folder(config.name)
    with listening(config, out, options) as listeners:
        folder = run(config, out, listeners=listeners, command=command_line())
    show_end(folder, options)
    return 0


TRAIN = Command(
    name="train",
    help="train as a configuration says, into a new run folder",
    add_options=add_configuration,
    run=train,
    trains=True,
)

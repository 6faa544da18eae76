"""`blocktrain resume DIR`: continue an interrupted run from its newest checkpoint."""

from __future__ import annotations

import argparse

from blocktrain.cli.command import Command, add_overrides, add_run_folder


def resume(options: argparse.Namespace) -> int:
    """Train to the end, then write the report and print the table."""
    from blocktrain.cli.live import quiet_libraries
    from blocktrain.cli.session import listening, show_end
    from blocktrain.train.run import resume as resume_run
    from blocktrain.train.run_folder import RunFolder

    quiet_libraries()
    config = RunFolder(options.run).config().resumed_with(options.overrides)
    with listening(config, options.run, options) as listeners:
        folder = resume_run(
            options.run,
            options.overrides,
            listeners=listeners,
            accepts_changed_data=options.accept_changed_data,
        )
    show_end(folder, options)
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_run_folder(parser)
    add_overrides(parser, "continue with another device, precision, memory, distributed layout ...; may be repeated")
    parser.add_argument(
        "--accept-changed-data",
        action="store_true",
        help="continue even if the training data are not those of the newest checkpoint",
    )


RESUME = Command(
    name="resume",
    help="continue an interrupted run from its newest checkpoint",
    add_options=_add_options,
    run=resume,
    trains=True,
)

"""`blocktrain config`: every key of the configuration, its default and what it does."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from blocktrain.cli.command import Command


def config(options: argparse.Namespace) -> int:
    """Print the keys: as a page on a terminal, as Markdown into a pipe, or as JSON."""
    from rich.console import Console
    from rich.markdown import Markdown

    from blocktrain.train.config_docs import page, tables

    if options.json:
        print(json.dumps([asdict(item) for item in tables()], indent=1))
    elif sys.stdout.isatty():
        Console().print(Markdown(page()))
    else:
        print(page(), end="")
    return 0


CONFIG = Command(
    name="config",
    help="show every key of the configuration, its default and what it does",
    add_options=lambda parser: None,
    run=config,
)

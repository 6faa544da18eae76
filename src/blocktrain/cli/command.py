"""What a command of `blocktrain` is, and the options that several commands share.

Each command has a file in this folder, which imports nothing heavy until the command runs, so that `--help` answers at
once; `main.py` lists them.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blocktrain.parse import output_path


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command: its name, its help, a function that adds its options to a parser, and one that runs it.

    trains: whether it is work of hours, which goes on when its output can no longer be written.
    """

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    trains: bool = False


def imported_when_run(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    """The function of a module of this folder, which is imported when the function is called."""

    def run(options: argparse.Namespace) -> int:
        return getattr(importlib.import_module(f"blocktrain.cli.{module}"), function)(options)

    return run


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Options of a command that starts a run: its configuration and the folder to write."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file, see examples/")
    add_overrides(parser, "override a key of the configuration; may be repeated")
    parser.add_argument(
        "--out",
        type=output_path,
        metavar="DIR",
        help="a new folder (default: runs/NAME, or runs/NAME-compare, with a number if it exists)",
    )


def add_overrides(parser: argparse.ArgumentParser, text: str) -> None:
    """The option `--set`, whose help is `text`."""
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides", help=text)


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    """The folder of a run, as a positional argument."""
    parser.add_argument("run", type=Path, metavar="DIR", help="the folder of a run")

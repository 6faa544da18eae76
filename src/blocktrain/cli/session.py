"""A session of training at the command line: its folder, its live line and trackers, and the table at its end."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from blocktrain.cli.live import LiveLine
from blocktrain.cli.show_runs import show_runs
from blocktrain.integrations.trackers import Trackers
from blocktrain.parallel.ranks import is_launched, launched_rank
from blocktrain.runtime import pick_device
from blocktrain.train.config import RunConfig
from blocktrain.train.pretrained_defaults import pretrained_defaults
from blocktrain.train.run_folder import RunFolder
from blocktrain.train.toml_dataclasses import read_toml
from blocktrain.train.trainer import Listener


def load_config(options: argparse.Namespace) -> RunConfig:
    """The configuration that the options name. What it leaves out and pretrained weights decide is shown."""
    values = read_toml(options.config, options.overrides)
    config, chosen = RunConfig.from_mapping(values), pretrained_defaults(values)
    if chosen:
        keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in chosen.items())
        console = Console(stderr=options.json, quiet=launched_rank() > 0)
        console.print(f"defaults for pretrained weights: {keys}", markup=False, highlight=False)
    return config


def print_config(config: RunConfig, *, as_json: bool) -> None:
    """Print a configuration with every key, as TOML or JSON."""
    from blocktrain.plan.configure import toml

    values = config.to_mapping()
    print(json.dumps(values, indent=1) if as_json else toml(values).strip())


def live_line(config: RunConfig, options: argparse.Namespace) -> LiveLine:
    """The live line of a run. It is written to stderr where stdout is to hold JSON, and on rank 0 only."""
    console = Console(stderr=options.json, quiet=launched_rank() > 0)
    return LiveLine(console, pick_device(config.device), tokenizer=getattr(config.data, "tokenizer", None))


@contextmanager
def listening(config: RunConfig, folder: Path, options: argparse.Namespace) -> Iterator[list[Listener]]:
    """The listeners of a run: its live line, and its trackers, which are flushed at the end."""
    with Trackers(config, folder) as trackers, live_line(config, options) as live:
        yield [live, trackers]


def show_end(folder: RunFolder, options: argparse.Namespace) -> None:
    """Write the report and print the table, on rank 0."""
    if launched_rank() == 0:
        show_runs([folder.path], folder.report, as_json=options.json)


def numbered_folder(name: str) -> Path:
    """`runs/NAME`, or the first of `runs/NAME-2`, `runs/NAME-3`, ... that does not exist.

    Under torchrun always `runs/NAME`, so that all processes agree, and so does the job when it is started again.
    """
    base = Path("runs") / "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    path, number = base, 1
    while path.exists() and not is_launched():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def command_line() -> str:
    """This command as one would type it."""
    return shlex.join(["blocktrain", *sys.argv[1:]])

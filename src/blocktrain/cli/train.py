"""The commands that train: `train`, `resume`, `compare`."""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from blocktrain.cli.live import LiveLine, quiet_libraries
from blocktrain.cli.show_comparison import price_of_card, show_comparison
from blocktrain.cli.show_runs import show_runs
from blocktrain.errors import ConfigError, Interrupted
from blocktrain.integrations.trackers import Trackers
from blocktrain.parallel.ranks import is_launched, launched_rank
from blocktrain.runtime import pick_device
from blocktrain.train.config import RunConfig
from blocktrain.train.run import resume as resume_run
from blocktrain.train.run import run
from blocktrain.train.run_folder import RunFolder


def train(options: argparse.Namespace) -> int:
    """`blocktrain train CONFIG`."""
    quiet_libraries()
    config = RunConfig.load(options.config, options.overrides)
    out = options.out or numbered_folder(config.name)
    with Trackers(config, out) as trackers, LiveLine(_live_console(options), pick_device(config.device)) as live:
        folder = run(config, out, listeners=[live, trackers], command=_command())
    _show([folder.path], folder.report, options)
    return 0


def resume(options: argparse.Namespace) -> int:
    """`blocktrain resume DIR`."""
    quiet_libraries()
    config = RunFolder(options.run).config().moved(options.overrides)
    with (
        Trackers(config, options.run) as trackers,
        LiveLine(_live_console(options), pick_device(config.device)) as live,
    ):
        folder = resume_run(options.run, options.overrides, listeners=[live, trackers])
    _show([folder.path], folder.report, options)
    return 0


def compare(options: argparse.Namespace) -> int:
    """`blocktrain compare CONFIG`."""
    from blocktrain.compare.compare import Search
    from blocktrain.compare.compare import compare as compare_methods

    quiet_libraries()
    config = RunConfig.load(options.config, options.overrides)
    methods = [name.strip() for name in options.methods.split(",") if name.strip()]
    if not methods:
        raise ConfigError("--methods names none; write for example --methods full,bcd")
    search = Search(factors=_factors(options.lr_search), seeds=options.seeds)
    usd_per_hour = None if options.card is None else price_of_card(options.card)
    out = options.out or numbered_folder(f"{config.name}-compare")
    try:
        with ExitStack() as stack:
            live = stack.enter_context(LiveLine(_live_console(options), pick_device(config.device)))
            comparison = compare_methods(
                config,
                methods,
                out,
                search=search,
                listeners=lambda folder: [live, stack.enter_context(Trackers(config, folder))],
                command=_command(),
            )
    except Interrupted as stop:
        again = _command() if options.out else f"{_command()} --out {shlex.quote(str(out))}"
        raise Interrupted(f"stopped; go on with: {again}", signal_number=stop.exit_code - 128) from None
    page, folders = out / "report.html", [folder.path for folder in comparison.folders]
    if launched_rank() == 0:
        show_comparison(
            folders, page, comparison.trials, card=options.card, usd_per_hour=usd_per_hour, as_json=options.json
        )
    return 0


def _factors(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--lr-search must be numbers with commas, such as 0.5,1,2, not '{text}'") from None


def _show(runs: list[Path], report: Path, options: argparse.Namespace) -> None:
    """The end of a command: one process of several writes the report and the table."""
    if launched_rank() == 0:
        show_runs(runs, report, as_json=options.json)


def numbered_folder(name: str) -> Path:
    """`runs/NAME`, or the first of `runs/NAME-2`, `runs/NAME-3`, ... that does not exist. Under torchrun `runs/NAME`:
    the same for all processes, and for the same job when it is started again."""
    base = Path("runs") / "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)
    number = 1
    if is_launched():
        return base
    while (path := base if number == 1 else base.with_name(f"{base.name}-{number}")).exists():
        number += 1
    return path


def _live_console(options: argparse.Namespace) -> Console:
    """Progress goes to stderr where stdout is to hold JSON; one process of several shows it."""
    return Console(stderr=options.json, quiet=launched_rank() > 0)


def _command() -> str:
    return shlex.join(["blocktrain", *sys.argv[1:]])

"""`blocktrain report DIR...`: write the page of one run, or one page that compares several."""

from __future__ import annotations

import argparse
from pathlib import Path

from blocktrain.cli.command import Command
from blocktrain.parse import output_path


def report(options: argparse.Namespace) -> int:
    """Write the page and print the table."""
    from blocktrain.cli.show_runs import show_runs

    show_runs(options.runs, options.out or options.runs[0] / "report.html", as_json=options.json)
    return 0


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="folders of runs")
    parser.add_argument(
        "--out", type=output_path, metavar="FILE", help="where to write it (default: report.html in the first folder)"
    )


REPORT = Command(
    name="report",
    help="write report.html for one run, or one page that compares several",
    add_options=_add_options,
    run=report,
)

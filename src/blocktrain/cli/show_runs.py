"""What the commands that train, `report` and `compare` print at their end: the report's place and tables of figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Any

from rich.console import Console

from blocktrain.compare.compare import Trial
from blocktrain.errors import ConfigError
from blocktrain.outputs import write_output
from blocktrain.plan.hardware import load_hardware
from blocktrain.report.comparison_table import comparison_rows, comparison_table
from blocktrain.report.in_words import in_words
from blocktrain.report.multiplier import loss_of, multipliers, multipliers_text
from blocktrain.report.page import write_report
from blocktrain.report.run import RunRecord
from blocktrain.report.summary import summaries_of
from blocktrain.report.summary_table import columns, rows, table


def show_runs(folders: Sequence[Path], page: Path, *, as_json: bool) -> None:
    """Write the report of some runs to `page` and print their table, or the same figures as JSON. Below the
    table of a single run, print it in sentences."""
    write_report(folders, page)
    runs = [RunRecord.load(folder) for folder in folders]
    if as_json:
        print(json.dumps(figures_of(runs, page), indent=1))
        return
    summaries = summaries_of(runs)
    compared = multipliers(runs, [item.name for item in summaries])
    console = Console()
    console.print()
    if console.width >= TABLE_WIDTH:
        console.print(table(summaries))
    else:
        headings = columns(summaries)
        for row in rows(summaries):
            cells = [f"{name} {cell}" for name, cell in zip(headings, row.cells, strict=True) if cell.strip()]
            console.print(f"{row.label.strip()}: {', '.join(cells)}", markup=False, highlight=False)
    if compared:
        text = multipliers_text(compared, runs[0].header.unit, loss_of(runs)[0])
        console.print(f"\n{text}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nreport  {page}", markup=False, highlight=False, soft_wrap=True)
    if len(runs) == 1:
        for sentence in in_words(runs[0], summaries[0]):
            console.print(f"\n{sentence}", markup=False, highlight=False)


def figures_of(runs: Sequence[RunRecord], page: Path) -> dict[str, Any]:
    """The runs' figures as plain data."""
    summaries = summaries_of(runs)
    compared = multipliers(runs, [item.name for item in summaries])
    figures = [{**asdict(item), "multiplier": item.value} for item in compared]
    return {"runs": [item.to_json() for item in summaries], "multipliers": figures, "report": str(page)}


TABLE_WIDTH = 72  # columns of a terminal; a narrower one gets a line for each quantity, so that no figure is cut off
MOST_COLUMNS = 3  # runs whose figures a terminal shows side by side


def price_of_card(name: str) -> Decimal:
    """Dollars for an hour of a card. Raises `ConfigError` where no provider has a price for it."""
    hardware = load_hardware()
    price = hardware.price(hardware.card(name).name)
    if price is None:
        raise ConfigError(f"no provider in the hardware file has a price for '{name}'; choose another --card")
    return price.usd_per_hour


def show_comparison(
    folders: Sequence[Path],
    page: Path,
    trials: Sequence[Trial],
    *,
    card: str | None,
    usd_per_hour: Decimal | None,
    as_json: bool,
) -> None:
    """Write the report and `comparison_rows.json` beside it; print both, or the same figures as JSON."""
    runs = [RunRecord.load(folder) for folder in folders]
    method_of = {page.parent / trial.folder: trial.method for trial in trials}
    found = comparison_rows(runs, [method_of[folder] for folder in folders], usd_per_hour=usd_per_hour)
    figures = {
        "comparison_rows": [asdict(item) for item in found],
        "trials": [asdict(trial) for trial in trials],
        "card": card,
    }
    write_output(page.with_name("comparison_rows.json"), json.dumps(figures, indent=1) + "\n")
    if as_json:
        write_report(folders, page)
        print(json.dumps({**figures_of(runs, page), **figures}, indent=1))
        return
    console = Console()
    if len(runs) <= MOST_COLUMNS:
        show_runs(folders, page, as_json=False)
    else:
        write_report(folders, page)
        console.print(f"\nreport  {page}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(comparison_table(found, card=card))
    for line in _searched(trials):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _searched(trials: Sequence[Trial]) -> list[str]:
    """A line for each method whose learning rate was searched: the loss at each rate, and the spread of the seeds."""
    lines = []
    for name in dict.fromkeys(trial.method for trial in trials):
        mine = [trial for trial in trials if trial.method == name]
        if len(mine) == 1:
            continue
        rates = {trial.lr: trial.loss for trial in mine if trial.seed == mine[0].seed}
        tried = ", ".join(f"{lr:g}: " + ("diverged" if loss is None else f"{loss:.4f}") for lr, loss in rates.items())
        best = min((trial for trial in mine if trial.loss is not None), key=lambda trial: trial.loss or 0.0)
        seeds = [trial.loss for trial in mine if trial.lr == mine[-1].lr and trial.loss is not None]
        spread = (
            f"; {len(seeds)} seeds {statistics.mean(seeds):.4f} +- {statistics.stdev(seeds):.4f}" if seeds[1:] else ""
        )
        lines.append(f"{name}: loss by learning rate {tried}; best {best.lr:g}{spread}")
    return lines

"""What `report` prints, and every command that trains at its end: the report's place and the table of figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from blocktrain.report.in_words import in_words
from blocktrain.report.multiplier import MeasuredMultiplier, loss_of, multipliers, multipliers_text
from blocktrain.report.report import write_report
from blocktrain.report.run import RunRecord
from blocktrain.report.summary import Summary, summaries_of
from blocktrain.report.summary_table import table


def show_runs(folders: Sequence[Path], page: Path, *, as_json: bool) -> None:
    """Write the report of some runs to `page` and print their table, or the same figures as JSON. Below the
    table of a single run, print it in sentences."""
    write_report(folders, page)
    runs = [RunRecord.load(folder) for folder in folders]
    if as_json:
        json.dump(figures_of(runs, page), sys.stdout, indent=1)
        print()
        return
    summaries, compared = _side_by_side(runs)
    console = Console()
    console.print()
    console.print(table(summaries))
    if compared:
        text = multipliers_text(compared, runs[0].header.unit, loss_of(runs)[0])
        console.print(f"\n{text}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nreport  {page}", markup=False, highlight=False, soft_wrap=True)
    if len(runs) == 1:
        for sentence in in_words(runs[0], summaries[0]):
            console.print(f"\n{sentence}", markup=False, highlight=False)


def figures_of(runs: Sequence[RunRecord], page: Path) -> dict[str, Any]:
    """The runs' figures as plain data."""
    summaries, compared = _side_by_side(runs)
    figures = [{**asdict(item), "multiplier": item.value} for item in compared]
    return {"runs": [item.to_json() for item in summaries], "multipliers": figures, "report": str(page)}


def _side_by_side(runs: Sequence[RunRecord]) -> tuple[list[Summary], list[MeasuredMultiplier]]:
    summaries = summaries_of(runs)
    return summaries, multipliers(runs, [item.name for item in summaries])

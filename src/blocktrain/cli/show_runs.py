"""The commands that show or hand over what a run made: `report`, `export`, `config`; and the table at a run's end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from blocktrain.report.in_words import in_words
from blocktrain.report.multiplier import Multiplier, loss_of, multipliers, multipliers_text
from blocktrain.report.report import write_report
from blocktrain.report.run import RunRecord
from blocktrain.report.summary import Summary, summaries_of, table


def show_runs(folders: Sequence[Path], page: Path, *, as_json: bool) -> None:
    """Write the report of some runs to `page` and print their table, or the same figures as JSON; below the table of a
    single run, print it in sentences."""
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
        console.print(f"\n{text}", highlight=False, soft_wrap=True)
    console.print(f"\nreport  {page}", highlight=False, soft_wrap=True)
    if len(runs) == 1:
        for sentence in in_words(runs[0], summaries[0]):
            console.print(f"\n{sentence}", highlight=False, markup=False)


def figures_of(runs: Sequence[RunRecord], page: Path) -> dict[str, Any]:
    """The runs' figures as plain data."""
    summaries, compared = _side_by_side(runs)
    figures = [{**asdict(item), "multiplier": item.value} for item in compared]
    return {"runs": summaries, "multipliers": figures, "report": str(page)}


def _side_by_side(runs: Sequence[RunRecord]) -> tuple[list[Summary], list[Multiplier]]:
    summaries = summaries_of(runs)
    return summaries, multipliers(runs, [item["name"] for item in summaries])


def report(options: argparse.Namespace) -> int:
    """`blocktrain report DIR...`."""
    show_runs(options.runs, options.out or options.runs[0] / "report.html", as_json=options.json)
    return 0


def export(options: argparse.Namespace) -> int:
    """`blocktrain export DIR OUT [--push owner/name]`."""
    from blocktrain.cli.live import quiet_libraries
    from blocktrain.integrations.card import write_card
    from blocktrain.integrations.hub import check_repository, push
    from blocktrain.train.export import export as export_run
    from blocktrain.train.run_folder import RunFolder

    if options.push is not None:
        check_repository(options.push)
    quiet_libraries()
    folder = RunFolder(options.run)
    out = export_run(folder, options.out, also=lambda place: write_card(folder, place))
    address = None if options.push is None else push(out, options.push, public=options.public)
    if options.json:
        json.dump({"exported": str(out), "pushed": address}, sys.stdout)
        print()
        return 0
    print(f"exported to {out}; {_how_to_load(out)}")
    if address is not None:
        print(f"pushed to {address}")
    return 0


def _how_to_load(out: Path) -> str:
    (name,) = json.loads((out / "config.json").read_text()).get("architectures") or [None]
    if name is None:
        return "its weights are in model.safetensors, its depth in config.json: see blocktrain.resnet"
    heads = {"ForCausalLM": "AutoModelForCausalLM", "LMHeadModel": "AutoModelForCausalLM"}
    heads |= {"ForSequenceClassification": "AutoModelForSequenceClassification"}
    heads |= {"ForImageClassification": "AutoModelForImageClassification"}
    known = next((auto for end, auto in heads.items() if name.endswith(end)), name)
    return f"load it with {known}.from_pretrained({str(out)!r})"


def config(options: argparse.Namespace) -> int:
    """`blocktrain config`."""
    from rich.markdown import Markdown

    from blocktrain.train.config_docs import page, tables

    if options.json:
        json.dump([asdict(item) for item in tables()], sys.stdout, indent=1)
        print()
    elif sys.stdout.isatty():
        Console().print(Markdown(page()))
    else:
        print(page(), end="")
    return 0

"""The paper's economics, recomputed: memory of Tables 4, 8, 10 and 11, every cell of Tables 5, 6, 7, 12, 13 and 14.

    python experiments/economics/economics.py [--write [FILE]]

Prints the tables; `--write` puts them into README.md (between its markers) and result.json. Takes a second.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path

import torch

from blocktrain.plan.cost import MULTIPLIERS, price_of, reduction
from blocktrain.plan.hardware import load_hardware
from blocktrain.plan.presets import find_model
from blocktrain.runtime import environment

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tabling import add_write, put  # noqa: E402 - found beside this folder

MODELS = ("G-1.6B", "G-5.4B", "G-10B", "G-20B")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A figure of the paper beside ours. Reductions are in percent; their deviation is in points, else in percent."""

    table: str
    row: str
    column: str
    paper: float
    ours: float
    deviation: float
    inputs: str


@dataclass(frozen=True)
class Times:
    """Milliseconds a step and GPUs, by model, with the table they stand in."""

    ms: Sequence[float]
    gpus: Sequence[int]
    source: str


BCD = Times((378.49, 1210.61, 2414.32, 3606), (1, 4, 8, 16), "BCD on 4090s: Table 15, G-20B Table 4")
FULL_4090 = Times((576, 1934, 3252, 6378), (2, 8, 16, 32), "full on 4090s: Table 4")
# What the cells of Table 5 follow from: OffLoad-Adam times of Table 3, those of another model in two of three cases.
TABLE_5 = Times((2403, 2403, 3252, 7076), (1, 8, 16, 32), "2403, 2403, 3252, 7076 ms on 1, 8, 16, 32 GPUs")
TABLE_12 = Times((2403, 1934, 3252, 7076), (1, 8, 16, 32), "2403, 1934, 3252, 7076 ms on 1, 8, 16, 32 GPUs")
A100 = Times((1064, 2952, 5772, 11222), (1, 2, 4, 8), "full on A100s: section 4.4.2, GPUs of Table 6")
A800 = Times((1122, 3126, 6042, 11722), (1, 2, 4, 8), "full on A800s: section 4.4.2, GPUs of Table 7")

# table -> (full training's times and its card, None where GPU hours are compared; worst and average in percent)
REDUCTIONS = {
    "5": (TABLE_5, "rtx4090", (56.5, 30.1, -2.8, 29.4), (80.4, 68.5, 53.6, 68.3)),
    "6": (A100, "a100-80", (75.1, 45.6, 44.4, 57.3), (88.8, 75.5, 74.9, 80.8)),
    "7": (A800, "a800", (61.1, 9.9, 7.0, 28.5), (82.5, 59.4, 58.1, 67.7)),
    "12": (TABLE_12, None, (56.1, 13.3, -2.8, 29.4), (80.2, 60.9, 53.6, 68.2)),
    "13": (A100, None, (1.5, -127.0, -131.8, -78.0), (55.6, -2.4, -4.5, 19.7)),
    "14": (A800, None, (6.4, -114.7, -121.6, -70.5), (57.8, 3.2, 0.08, 23.1)),
}
READINGS = {"worst": MULTIPLIERS["worst"], "average": MULTIPLIERS["tables"]}

# Parameters; bytes a parameter: full Adam 4 + 4 + 8, in blocks 4 + 12 / M; SGD with momentum 4 + 4 + 4, 4 + 8 / M.
ADAM, SGD = 12.0, 8.0
RESNET14 = 175_258  # option B shortcuts, see docs/decisions/0005-resnet-50-and-101.md
MEMORY = {
    "g-1.6b": (24.077, 12.038),
    "g-5.4b": (81.881, 40.942),
    "g-10b": (160.738, 80.370),
    "g-20b": (312.805, 156.402),
    "l-1.5b": (24.632, 11.662),
    "l-6b": (89.815, 44.908),
    "l-11b": (175.714, 87.858),
    "l-23b": (347.539, 173.769),
}
TABLE_11 = {
    "SGD": (SGD, (1824.45, 1216.30, 1013.58, 912.23)),
    "Adam": (ADAM, (2432.60, 1520.38, 1216.30, 1064.26)),
}


def bytes_in_blocks(parameters: float, extra: float, blocks: int) -> float:
    """Weights of all, gradients and moments of one block of `blocks`."""
    return parameters * (4 + extra / blocks)


def memory_cells() -> Iterator[Cell]:
    """Tables 4 and 8, 10, 11."""
    for name, (full, thirds) in MEMORY.items():
        for blocks, paper in ((1, full), (3, thirds)):
            ours = bytes_in_blocks(find_model(name).parameters, ADAM, blocks) / 2**30
            yield _memory(("4, 8", name.upper(), "full" if blocks == 1 else "M = 3"), paper, ours, "GiB, Adam")
    for blocks, paper in ((1, 2.01), (3, 1.12)):
        ours = bytes_in_blocks(RESNET14, SGD, blocks) / 2**20
        yield _memory(("10", "ResNet-14", "full" if blocks == 1 else "M = 3"), paper, ours, "MiB, SGD with momentum")
    parameters = TABLE_11["Adam"][1][0] * 1e6 / 16  # its model's size, from its first cell
    for optimizer, (extra, cells) in TABLE_11.items():
        for blocks, paper in enumerate(cells, start=1):
            ours = bytes_in_blocks(parameters, extra, blocks) / 1e6
            yield _memory(("11", f"GPT-2, {optimizer}", f"M = {blocks}"), paper, ours, "MB, 152.04M parameters")


def _memory(place: tuple[str, str, str], paper: float, ours: float, inputs: str) -> Cell:
    table, row, column = place
    deviation = round((ours / paper - 1) * 100, 2)
    return Cell(
        table=table, row=row, column=column, paper=paper, ours=round(ours, 3), deviation=deviation, inputs=inputs
    )


def reduction_cells() -> Iterator[Cell]:
    """Tables 5, 6, 7, 12, 13, 14 with the inputs that give the paper's cells; then Table 5 with Table 4's times."""
    for table, (full, card, *papers) in REDUCTIONS.items():
        for name, cells in zip(READINGS, papers, strict=True):
            yield from _reductions(table, name, full, card, cells)
    for name, cells in zip(READINGS, REDUCTIONS["5"][2:], strict=True):
        yield from _reductions("5, times of Table 4", name, FULL_4090, "rtx4090", cells)


def _reductions(table: str, name: str, full: Times, card: str | None, cells: Sequence[float]) -> Iterator[Cell]:
    multiplier = READINGS[name]
    prices = load_hardware().prices["wuwen"]
    ours_price = prices["rtx4090"].usd_per_hour if card else Decimal(1)
    full_price = prices[card].usd_per_hour if card else Decimal(1)
    for index, model in enumerate(MODELS):
        cost = price_of(BCD.ms[index] / 1000 * multiplier, BCD.gpus[index], ours_price)
        full_cost = price_of(full.ms[index] / 1000, full.gpus[index], full_price)
        ours = 100 * reduction(float(cost.amount), float(full_cost.amount))
        yield Cell(
            table=table,
            row=name,
            column=model,
            paper=cells[index],
            ours=round(ours, 2),
            deviation=round(ours - cells[index], 2),
            inputs=f"multiplier {multiplier:g}; {full.source}",
        )


def cells() -> list[Cell]:
    """Everything."""
    return [*memory_cells(), *reduction_cells()]


def tables(found: Sequence[Cell]) -> str:
    """As Markdown, one table of the paper after the other."""
    text = []
    for table in dict.fromkeys(cell.table for cell in found):
        mine = [cell for cell in found if cell.table == table]
        unit = "points" if mine[0].row in READINGS else "%"
        head = f"| row | column | paper | ours | deviation, {unit} | inputs |"
        text.append(f"\n### Table {table}\n\n{head}\n|---|---|---|---|---|---|")
        text += [
            f"| {cell.row} | {cell.column} | {cell.paper:g} | {cell.ours:g} | {cell.deviation:+.2f} | {cell.inputs} |"
            for cell in mine
        ]
    return "\n".join(text).lstrip() + "\n"


def main() -> None:
    """Print, and with `--write` keep, the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser, HERE / "result.json")
    options = parser.parse_args()
    found = cells()
    text = tables(found)
    print(text)
    if options.write:
        result = {"environment": environment(torch.device("cpu")), "cells": [asdict(cell) for cell in found]}
        options.write.write_text(json.dumps(result, indent=1) + "\n")
        if options.write.parent == HERE:
            put(HERE / "README.md", "economics.py", text)


if __name__ == "__main__":
    main()

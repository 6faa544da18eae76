"""Tables 9, 10 and 11: sampling 90 % of the data a visit; training all, a half, a third or a quarter at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from runner import Case, Experiment, Results, markdown
from settings import SIZES, cifar, wikitext
from training import training_case

# (table, model, optimizer, sampling rate, blocks) -> (epochs, accuracy in percent, loss, MB)
PAPER = {
    ("9", "GPT-2", "SGD", 0.9, 3): (40, 68.9, 1.9312, 1013.58),
    ("9", "GPT-2", "Adam", 0.9, 3): (60, 67.5, 1.9110, 1216.30),
    ("10", "ResNet-14", "SGD", 0.9, 3): (427, 88.7, 0.0616, 1.12),
    ("10", "ResNet-14", "SGD", 1.0, 3): (391, 89.0, 0.0613, 1.12),
    ("10", "ResNet-14", "SGD", 1.0, 1): (323, 88.9, 0.0708, 2.01),
    ("11", "GPT-2", "SGD", 1.0, 1): (24, 69.6, 1.9407, 1824.45),
    ("11", "GPT-2", "SGD", 1.0, 2): (40, 67.1, 1.9033, 1216.30),
    ("11", "GPT-2", "SGD", 1.0, 3): (44, 69.1, 1.9343, 1013.58),
    ("11", "GPT-2", "SGD", 1.0, 4): (50, 67.5, 1.9109, 912.23),
    ("11", "GPT-2", "Adam", 1.0, 1): (18, 65.9, 1.8869, 2432.60),
    ("11", "GPT-2", "Adam", 1.0, 2): (40, 66.3, 1.8924, 1520.38),
    ("11", "GPT-2", "Adam", 1.0, 3): (50, 66.2, 1.8910, 1216.30),
    ("11", "GPT-2", "Adam", 1.0, 4): (60, 66.8, 1.8995, 1064.26),
}


def cases(scale: str) -> Sequence[Case]:
    """In the order of the tables."""
    found = []
    for table_number, model, optimizer, rate, blocks in PAPER:

        def tables(
            place: Any, model: str = model, optimizer: str = optimizer, rate: float = rate, blocks: int = blocks
        ) -> dict[str, Any]:
            sampling = {"scope": "visit", "rate": rate} if rate < 1 else {}
            if model == "GPT-2":
                return wikitext(place, scale, optimizer, blocks=blocks, sampling=sampling)
            return cifar(place, scale, 14, optimizer, blocks=blocks, sampling=sampling)

        name = _name((table_number, model, optimizer, rate, blocks))
        method = "full" if blocks == 1 else "bcd"
        found.append(training_case(name, SIZES[scale].words, tables, method=method, slug=f"ufp-{scale}-{name}"))
    return found


def table(results: Results) -> str:
    """The paper's row beside ours."""
    rows = []
    for key, (epochs, accuracy, loss, megabytes) in PAPER.items():
        number, model, optimizer, rate, blocks = key
        for record in results.values():
            if record["case"] != _name(key):
                continue
            ours = record["figures"]
            shown = ours["accuracy"] if ours["accuracy"] is not None else math.exp(ours["validation_loss"])
            stated = [number, model, optimizer, f"{rate:g}", f"1/{blocks}", str(epochs), f"{accuracy:g} %", f"{loss:g}"]
            measured = [shown, ours["validation_loss"], ours["memory_bytes"] / 1e6, record["scale"]]
            rows.append([*stated, f"{megabytes:g}", *measured])
    headings = ["table", "model", "optimizer", "SR", "UFP", "paper: epochs", "accuracy", "loss", "MB"]
    return markdown([*headings, "ours: accuracy (ResNet) or perplexity", "loss", "MB", "our scale"], rows)


def _name(key: tuple[str, str, str, float, int]) -> str:
    number, model, optimizer, rate, blocks = key
    return f"table {number}: {model}, {optimizer}, SR {rate:g}, UFP 1 of {blocks}"


EXPERIMENT = Experiment(name="table9_10_11", cases=cases, table=table)

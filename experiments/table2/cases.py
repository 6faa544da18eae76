"""Table 2: ResNets on CIFAR-10 and GPT-2 on WikiText, SGD and Adam, full training and three blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from runner import Case, Experiment, Results, markdown
from settings import SIZES, cifar, wikitext
from training import multiplier, training_case

# (epochs or iterations, accuracy in percent or perplexity, loss): full, then BCD
PAPER = {
    ("ResNet-8", "SGD"): ((639, 86.9, 0.1671), (395, 87.2, 0.1783)),
    ("ResNet-14", "SGD"): ((323, 88.9, 0.0708), (391, 89.0, 0.0613)),
    ("ResNet-20", "SGD"): ((191, 88.7, 0.0574), (322, 88.7, 0.0263)),
    ("ResNet-8", "Adam"): ((389, 83.1, 0.3955), (309, 86.0, 0.2279)),
    ("ResNet-14", "Adam"): ((491, 85.7, 0.0969), (372, 87.6, 0.0527)),
    ("ResNet-20", "Adam"): ((768, 86.3, 0.0269), (423, 88.3, 0.0222)),
    ("GPT-2", "SGD"): ((111587, 6.9639, 1.9407), (204575, 6.9189, 1.9343)),
    ("GPT-2", "Adam"): ((83690, 6.5988, 1.8869), (232471, 6.6263, 1.8910)),
}


def cases(scale: str) -> Sequence[Case]:
    """Full training first, so that BCD has something to be compared with."""
    found = []
    for model, optimizer in PAPER:
        for method in ("full", "bcd"):
            depth = int(model.rpartition("-")[2])

            def tables(
                place: Any, model: str = model, optimizer: str = optimizer, depth: int = depth
            ) -> dict[str, Any]:
                if model == "GPT-2":
                    return wikitext(place, scale, optimizer)
                return cifar(place, scale, depth, optimizer)

            name = f"{model}, {optimizer}, {method}"
            found.append(training_case(name, SIZES[scale].words, tables, method=method, slug=f"table2-{scale}-{name}"))
    return found


def table(results: Results) -> str:
    """The paper's row beside ours."""
    rows = []
    for (model, optimizer), paper in PAPER.items():
        for scale in sorted({record["scale"] for record in results.values()}):
            full, bcd = (
                results.get(f"{model}, {optimizer}, {method} [{scale}]", {}).get("figures")
                for method in ("full", "bcd")
            )
            if full is None and bcd is None:
                continue
            ratio = paper[1][0] / paper[0][0]
            ours = multiplier(full, bcd) if full and bcd else None
            stated = [model, optimizer, f"{paper[0][1]:g} / {paper[1][1]:g}", ratio]
            losses = [figures and figures["validation_loss"] for figures in (full, bcd)]
            rows.append([*stated, _quality(full), _quality(bcd), *losses, ours, scale])
    headings = ["model", "optimizer", "paper: accuracy or perplexity, full / BCD", "paper: B-F", "full", "BCD"]
    return markdown([*headings, "loss, full", "loss, BCD", "B-F", "our scale"], rows)


def _quality(figures: Any) -> str | None:
    if figures is None:
        return None
    if figures["accuracy"] is not None:
        return f"{100 * figures['accuracy']:.1f} %"
    return f"{math.exp(figures['validation_loss']):.2f}"


EXPERIMENT = Experiment(name="table2", cases=cases, table=table)

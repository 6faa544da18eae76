"""Cases that train: a configuration to figures, through the package's own runs, resumed from their checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runner import Case, Figures, Place

from blocktrain.baselines.compare import compare
from blocktrain.errors import DataError
from blocktrain.report.multiplier import tokens_to_reach
from blocktrain.report.run import RunRecord
from blocktrain.report.summary import summary
from blocktrain.train.config import RunConfig

Tables = dict[str, Any]  # the tables of a configuration
MOST_POINTS = 60  # of a curve in a result


def training_case(
    name: str, scale: str, tables: Callable[[Place], Tables], *, method: str, slug: str, seed: int = 0
) -> Case:
    """Trains `tables(place)` by `method`; `slug` names its run folder."""

    def run(place: Place) -> Figures:
        config = RunConfig.from_mapping({**tables(place), "seed": seed, "device": str(place.device)})
        out = place.work / re.sub(r"[^A-Za-z0-9.-]+", "-", slug)
        comparison = compare(config, [method], out, listeners=lambda folder: (_progress(name),))
        return figures_of(RunRecord.load(comparison.folders[0].path))

    return Case(name=name, scale=scale, run=run, seed=seed)


def figures_of(run: RunRecord) -> Figures:
    """What a table needs of a run, and its curve (units seen, validation loss, accuracy)."""
    told = summary(run)
    kept = ("validation_loss", "accuracy", "steps", "tokens", "unit", "seconds", "flops", "parameters", "blocks")
    rows = run.evaluations[:: -(-len(run.evaluations) // MOST_POINTS)]
    if run.evaluations and rows[-1] is not run.evaluations[-1]:
        rows = [*rows, run.evaluations[-1]]
    return {
        **{key: told[key] for key in kept},
        "optimizer": run.header.optimizer,
        "optimizer_bytes": told["optimizer_bytes_measured"],
        "memory_bytes": sum(told["memory"].values()) - told["memory"]["activations"],
        "config": _portable(run.details["config"]),
        "curve": [[row.tokens, round(row.loss, 5), row.accuracy] for row in rows],
    }


def _portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the folders of one machine."""
    text = re.sub(r'"[^"]*/([^"/]+)"', r'"\1"', json.dumps(config))
    return json.loads(text)


def multiplier(full: Figures, other: Figures) -> float | None:
    """Units that `other` needs over those of `full`, to the final loss of `full`; None where it did not reach it."""
    curve = [(seen, loss) for seen, loss, _ in other["curve"]]
    seen = tokens_to_reach(full["curve"][-1][1], curve)
    return None if seen is None else seen / full["tokens"]


def data_folder(place: Place, name: str) -> str:
    """The folder called `name` of the real data."""
    if place.data is None or not (place.data / name).exists():
        raise DataError(f"no '{name}' in the data folder ({place.data}); give --data FOLDER")
    return str(Path(place.data / name).resolve())


def _progress(name: str) -> Callable[[Mapping[str, Any]], None]:
    def listen(event: Mapping[str, Any]) -> None:
        if event["kind"] == "evaluation":
            print(f"{name}: step {event['step']}, validation {event['loss']:.4f}, {event['seconds']:.0f} s", flush=True)

    return listen

"""Cases that train: a configuration to figures, through the package's own runs, resumed from their checkpoints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from runner import Case, Figures, Place

from blocktrain.compare.compare import Search, compare
from blocktrain.errors import DataError
from blocktrain.records.run_records import Evaluation, Record
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


def searched(config: RunConfig, method: str, out: Path, search: Search) -> Figures:
    """A method at each rate of the search, and its best rate at each seed: (rate, last loss) of the first, `figures_of`
    the second."""
    found = compare(config, [method], out, search=search, listeners=lambda folder: (_progress(folder.name),))
    best = min(found.trials, key=lambda trial: (trial.seed, math.inf if trial.loss is None else trial.loss))
    chosen = [trial for trial in found.trials if trial.factor == best.factor and trial.loss is not None]
    return {
        "search": [[trial.lr, trial.loss] for trial in found.trials if trial.seed == config.seed],
        "lr": best.lr,
        "seeds": [trial.seed for trial in chosen],
        "runs": [figures_of(RunRecord.load(out / trial.folder)) for trial in chosen],
    }


def loss_after(curve: Sequence[Sequence[Any]], tokens: float) -> float:
    """The loss of a curve after `tokens`, on the line between the evaluations around it."""
    return float(np.interp(tokens, [row[0] for row in curve], [row[1] for row in curve]))


def spent(name: str, run: Figures, step: float, cost: Mapping[str, float], *, called: str) -> float:
    """What the first `step` steps of a run cost, in the unit of `cost`, a step of each kind: of the method `name`, or
    in block i under `called` i."""
    if name in cost:
        return step * cost[name]
    total = 0.0
    for (block, begun, uncached), (_, stop, _) in zip(run["visits"], [*run["visits"][1:], [0, step, 0]], strict=True):
        taken = max(min(step, stop) - begun, 0)
        without = min(taken, uncached)
        total += without * cost[f"{called} {block}"]
        if taken > without:
            total += (taken - without) * cost[f"{called} {block}, cached"]
    return total


def figures_of(run: RunRecord) -> Figures:
    """What a table needs of a run; its visits (block, first step, steps without stored hidden states, which come first)
    and its curve (units seen, validation loss, accuracy).

    memory_bytes is the most that weights, gradients and optimizer take in a visited block, peak_bytes tracked.
    """
    told = summary(run).to_json()
    visited = sorted({visit.block for visit in run.visits}) if len(run.header.blocks) > 1 else []
    kept = ("validation_loss", "accuracy", "steps", "tokens", "unit", "seconds", "flops", "parameters", "blocks")
    rows = run.evaluations[:: -(-len(run.evaluations) // MOST_POINTS)]
    if run.evaluations and rows[-1] is not run.evaluations[-1]:
        rows = [*rows, run.evaluations[-1]]
    return {
        **{key: told[key] for key in kept},
        "optimizer": run.header.optimizer,
        "optimizer_bytes": told["optimizer_bytes_measured"],
        "memory_bytes": _worst_kept_bytes(run, visited),
        "peak_bytes": _peak_bytes(run, visited),
        "visits": _visits(run),
        "config": _portable(run.details["config"]),
        "curve": [[row.tokens, round(row.loss, 5), row.accuracy] for row in rows],
    }


def _worst_kept_bytes(run: RunRecord, visited: Sequence[int]) -> int | None:
    """Of the worst of the visited blocks, or of what else is trained; None where the log does not tell."""
    if run.cost is None:
        return None
    blocks = [run.cost.memory.full] if run.is_full else run.cost.memory.blocks
    return max(map(kept_bytes, _of(blocks, visited)))


def kept_bytes(parts: Mapping[str, int]) -> int:
    """Weights, gradients and optimizer state: all parts but activations."""
    return sum(parts.values()) - parts["activations"]


def _peak_bytes(run: RunRecord, visited: Sequence[int]) -> int | None:
    """The same, tracked."""
    if run.memory_peaks is None:
        return None
    peaks = [run.memory_peaks.full] if run.is_full else run.memory_peaks.blocks
    return max(sum(peak.parts.values()) for peak in _of(peaks, visited))


def _of(found: Sequence[Any], visited: Sequence[int]) -> Sequence[Any]:
    return [found[block] for block in visited] or found


def _visits(run: RunRecord) -> list[list[int]]:
    """Steps that fill a cache come first: a visit's first pass over its rows."""
    rows = run.header.rows_per_step
    stops = [visit.step for visit in run.visits[1:]] + [run.steps_done] * bool(run.visits)
    filled = {use.visit: -(-use.computed // rows) for use in run.cache_uses}
    return [
        [visit.block, visit.step, filled.get(visit.visit, stop - visit.step)]
        for visit, stop in zip(run.visits, stops, strict=True)
    ]


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


def _progress(name: str) -> Callable[[Record], None]:
    def listen(record: Record) -> None:
        if isinstance(record, Evaluation):
            print(f"{name}: step {record.step}, validation {record.loss:.4f}, {record.seconds:.0f} s", flush=True)

    return listen

"""ResNet-20 on CIFAR-10, full and in blocks, for as many steps as the same seconds buy.

The clock is not asked, which a busy machine disturbs: steps of full training and of every block are timed in turns
("step time"), and a run in blocks is longer by what an average step of it is cheaper. The table says how well that was
met: steps times price, over full training's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pyarrow import parquet
from runner import Case, Experiment, Figures, Place, Results, markdown
from stepping import Contender, interleaved, steps_of
from tabling import spread
from training import data_folder, searched, spent

from blocktrain.compare.compare import Search, compare
from blocktrain.compare.methods import METHODS
from blocktrain.train.config import RunConfig
from blocktrain.train.context import build


class Entry(NamedTuple):
    """A row of the table. longer: its steps, over full training's. visits: in a sweep. once: a single sweep."""

    method: str
    longer: float
    visits: int = 1
    overrides: tuple[str, ...] = ()
    seeds: int = 3
    once: bool = False


class Length(NamedTuple):
    """How far a run goes. search, steps: of full training, at each rate of the search and at the best one. factors: the
    search's, of the rate in resnet20.toml. sweeps: of blocks in those steps. images: what is trained on; every: of a
    file only each n-th. seeds: at most."""

    words: str
    search: int
    factors: tuple[float, ...]
    steps: int
    sweeps: int
    images: str
    overrides: tuple[str, ...] = ()
    every: int = 1
    seeds: int = 3


# Blocks get about full training's time; the table says how near.
ENTRIES: dict[str, Entry] = {
    "full": Entry("full", 1.0),
    "blocks": Entry("bcd", 1.9125, 3),
    "suffix": Entry("bcd", 1.8375, 3, ("schedule.span=suffix",)),
    "suffix, block 0 twice": Entry("bcd", 1.5, 4, ("schedule.span=suffix", "schedule.order=[0, 0, 1, 2]")),
    "suffix, block 0 until the end": Entry(
        "bcd", 1.15, 5, ("schedule.span=suffix", "schedule.order=[0, 0, 0, 0, 1]"), once=True
    ),
    "two blocks": Entry("bcd", 1.525, 2, ("blocks.count=2",), seeds=1),
}
ONE_FILE = "cifar10/train-00000-of-00006.parquet"
LENGTHS: dict[str, tuple[Length, ...]] = {
    "tiny": (
        Length(
            "tiny, only to see that it runs", 2, (1.0,), 4, 1, ONE_FILE,
            ("batch.rows=8", "evaluation.rows=16", "evaluation.batch_rows=8"), seeds=1,
        ),
    ),
    "short": (
        Length(
            "8,334 images, 640 full steps of 64 (5 epochs), 240 at each rate of the search; all 10,000 test images",
            240, (0.5, 1.0, 2.0), 640, 8, ONE_FILE,
        ),
        Length(
            "2,084 images, 2,400 full steps of 64 (74 epochs), 480 at each rate of the search; all 10,000 test images",
            480, (0.25, 0.5, 1.0), 2_400, 10, ONE_FILE, every=4,
        ),
    ),
    "card": (
        Length(
            "50,000 images, 78,200 full steps of 128 (200 epochs), 7,820 at each rate of the search",
            7_820, (0.5, 1.0, 2.0), 78_200, 128, "cifar10",
            ("batch.rows=128", "checkpoint.every=3910 steps", "learning_rate.warmup_steps=391"),
        ),
    ),
}  # fmt: skip
TIMED = {length.words: lengths[0].words for lengths in LENGTHS.values() for length in lengths}  # where step times are
ROUNDS = {"tiny": 1, "short": 25, "card": 25}
CONFIG = Path(__file__).with_name("resnet20.toml")
PAPER = ((191, 88.7, 0.0574), (322, 88.7, 0.0263))  # table 2, SGD: epochs, accuracy in percent, loss; full, BCD


def cases(scale: str) -> Sequence[Case]:
    """Of the shortest run the step times, which hold for all; then of each, each method's search and training."""

    def trained(name: str, length: Length) -> Case:
        def run(place: Place) -> Figures:
            out = place.runs(f"resnet20-{scale}-{length.steps}", name)
            return _trained(ENTRIES[name], length, place, out)

        return Case(name=name, scale=length.words, run=run)

    def stepped(place: Place) -> Figures:
        contenders: dict[str, Contender] = {}
        for name, entry in ENTRIES.items():
            contenders |= _by_block(name, entry, _config(entry, lengths[0], place, lengths[0].steps), place)
        for step in contenders.values():
            step()
        return interleaved(contenders, "full", rounds=ROUNDS[scale])

    lengths = LENGTHS[scale]
    timing = Case(name="step time", scale=lengths[0].words, run=stepped)
    return [timing, *(trained(name, length) for length in lengths for name in ENTRIES)]


def _trained(entry: Entry, length: Length, place: Place, out: Path) -> Figures:
    """The search's rates over a short run on the first seed, the best of them over a whole one on every seed."""
    searching = _config(entry, length, place, length.search)
    rates = compare(
        replace(searching, evaluation=replace(searching.evaluation, rows=min(searching.evaluation.rows, 2_000))),
        [entry.method],
        out / "rates",
        search=Search(factors=length.factors),
    ).trials
    best = min(rates, key=lambda trial: math.inf if trial.loss is None else trial.loss)
    config = _config(entry, length, place, length.steps)
    config = replace(config, optimizer=replace(config.optimizer, lr=best.lr))
    figures = searched(config, entry.method, out, Search(seeds=min(entry.seeds, length.seeds)))
    return {**figures, "search": [[trial.lr, trial.loss] for trial in rates]}


def _config(entry: Entry, length: Length, place: Place, full_steps: int) -> RunConfig:
    """A run that takes as long as `full_steps` of full training, with the visits of the whole run."""
    steps = round(full_steps * entry.longer)
    sweeps = 1 if entry.once else length.sweeps
    visit = max(1, round(length.steps * entry.longer) // (sweeps * entry.visits))
    whole = Path(data_folder(place, length.images))
    source = whole if length.every == 1 else _every(length.every, whole, place.work)
    data = [f"images.source={source}", f"images.validation={data_folder(place, 'cifar10')}"]
    until = [f"stop.duration={steps} steps", f"evaluation.every={steps} steps", f"schedule.visit={visit} steps"]
    return RunConfig.load(CONFIG, [*data, *until, f"device={place.device}", *length.overrides, *entry.overrides])


def _every(step: int, whole: Path, folder: Path) -> Path:
    """A file of every `step`-th image; classes are mixed."""
    few = folder.resolve() / f"{whole.stem}-every-{step}.parquet"
    if not few.exists():
        few.parent.mkdir(parents=True, exist_ok=True)
        images, partial = parquet.read_table(whole), few.with_suffix(".partial")
        parquet.write_table(images.take(list(range(0, len(images), step))), partial)
        partial.replace(few)
    return few


# -- step times -------------------------------------------------------------------------------------------------------


def _by_block(name: str, entry: Entry, config: RunConfig, place: Place) -> dict[str, Contender]:
    """A step in each block of a method; full training has one."""
    context = build(METHODS[entry.method].change(config, 10_000, build(config, place.work).geometry), place.work)
    return {step_of(name, index): steps_of(context, block) for index, block in enumerate(context.trained)}


def step_of(name: str, block: int) -> str:
    """What a step of a method is called among the step times."""
    return name if name == "full" else f"{name}, {block}"


# -- table ------------------------------------------------------------------------------------------------------------


def table(results: Results) -> str:
    """The paper's row, and a line a method at each scale."""
    text = ""
    for scale in sorted(
        {record["scale"] for record in results.values()}, key=lambda scale: [*TIMED, scale].index(scale)
    ):
        found = {name: results[key]["figures"] for name in ENTRIES if (key := f"{name} [{scale}]") in results}
        steps = results.get(f"step time [{TIMED.get(scale, scale)}]", {}).get("figures", {}).get("steps", {})
        cost = {name: timing["ratio"] for name, timing in steps.items()}
        rows = [_paper_row(name, paper) for name, paper in zip(("full", "BCD"), PAPER, strict=True)]
        rows += [_row(name, figures, found, cost) for name, figures in found.items()]
        headings = ["", "rate", "seeds", "length", "time, of full's", "accuracy, %", "points above full", "loss"]
        text += f"{scale}\n\n" + markdown([*headings, "memory, of full's", "rates: loss"], rows) + "\n"
        if f"step time [{scale}]" in results:
            text += "A step's time, of a full step: " + ", ".join(f"{k} {v:.3f}" for k, v in cost.items()) + ".\n\n"
    return text


def _paper_row(name: str, paper: tuple[int, float, float]) -> list[Any]:
    epochs, accuracy, loss = paper
    above = None if paper is PAPER[0] else f"{accuracy - PAPER[0][1]:.1f}"
    return [
        f"paper, {name}",
        "0.1",
        None,
        f"{epochs} epochs",
        None,
        f"{accuracy:.1f}",
        above,
        f"{loss:.4f}",
        None,
        None,
    ]


def _row(name: str, figures: Figures, found: Mapping[str, Figures], cost: Mapping[str, float]) -> list[Any]:
    runs, first = figures["runs"], figures["runs"][0]
    full = found.get("full", {}).get("runs")
    accuracies = [100 * run["accuracy"] for run in runs]
    above = memory = time = None
    if full and figures is not found["full"]:
        whole = [100 * run["accuracy"] for run in full]
        above = spread([mine - other for mine, other in zip(accuracies, whole, strict=False)], 1)
    if full:
        memory = first["memory_bytes"] / full[0]["memory_bytes"]
        time = price(name, first, cost) / full[0]["steps"] if cost else None
    trials = ", ".join(f"{lr:g}: {'diverged' if loss is None else f'{loss:.3f}'}" for lr, loss in figures["search"])
    return [
        f"ours, {name}",
        f"{figures['lr']:g}",
        len(runs),
        f"{first['steps']:,} steps",
        time,
        spread(accuracies, 1),
        above,
        spread([run["curve"][-1][1] for run in runs], 3),
        memory,
        trials,
    ]


def price(name: str, run: Figures, cost: Mapping[str, float]) -> float:
    """What a run's steps cost together, in full steps."""
    return spent(name, run, run["steps"], cost, called=f"{name},")


EXPERIMENT = Experiment(name="resnet20", cases=cases, table=table)

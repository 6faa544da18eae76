"""Fine-tuning a pretrained encoder: full, LoRA, BAdam and in blocks, and the time each takes to full training's loss.

Time is not the clock's, which a busy machine disturbs: steps of every kind are timed in turns ("step time"), and a
run's time to a step is the sum of its steps' shares of a full step, those that fill a prefix cache at their price
without one.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rivals  # noqa: F401 - registers the adapters
from runner import Case, Experiment, Figures, Place, Results, markdown
from stepping import Contender, interleaved, steps_of, steps_of_external
from tabling import spread
from training import data_folder, searched, spent

from blocktrain.compare.compare import Search
from blocktrain.compare.external_setup import VISIT
from blocktrain.compare.methods import method as find_method
from blocktrain.report.multiplier import tokens_to_reach
from blocktrain.train.config import RunConfig
from blocktrain.train.context import build

MODEL = "all-MiniLM-L6-v2"
TRAIN_EVERY, VALIDATION_EVERY = 10, 12  # rows: 1,000 of 10,003 and 256 of 3,080
CONFIG = Path(__file__).with_name("banking77.toml")


class Entry(NamedTuple):
    """A row of the table. method: of `blocktrain compare`. seeds: of its best rate. blocks: what its blocks are called
    where steps in them are timed."""

    method: str
    overrides: tuple[str, ...] = ()
    seeds: int = 1
    blocks: str = "block"


SMALL = "blocks.largest=5600000"  # the embedding in three, the layers in two
BLOCKS = 'blocks.patterns=[["embedding"], ["*layer.[012]"], ["*layer.[345]", "head"]]'
ENTRIES: dict[str, Entry] = {
    "full": Entry("full", seeds=3),
    "blocks, top half": Entry("bcd", (BLOCKS, "schedule.order=[2]", "schedule.visit=120 steps"), seeds=3),
    # ten times that rate: of 4e-3, 8e-3 and 16e-3 the lowest was best
    "lora": Entry("lora", ("optimizer.lr=2e-4",), seeds=3),
    "blocks, top then below": Entry(
        "bcd", (BLOCKS, "schedule.order=[2, 2, 1]", "schedule.visit=40 steps", "optimizer.state=host")
    ),
    "blocks, every weight": Entry(
        "bcd",
        (SMALL, "schedule.order=[4, 4, 4, 4, 4, 4, 3, 2, 1, 0]", "schedule.visit=12 steps", "optimizer.state=host"),
        seeds=3,
        blocks="part",
    ),
    "badam": Entry("badam", (BLOCKS, "schedule.order=descending", "schedule.visit=40 steps"), seeds=3),
}
FEW = ("stop.duration=4 steps", "evaluation.rows=16", "schedule.visit=2 steps")
OVERRIDES = {"tiny": FEW, "short": (), "card": ()}
WORDS = {
    "tiny": "tiny, only to see that it runs",
    "short": "1,000 texts of Banking77, 120 steps of 16 texts of at most 32 tokens",
}
WORDS["card"] = WORDS["short"]
ROUNDS = {"tiny": 1, "short": 7, "card": 9}


def cases(scale: str) -> Sequence[Case]:
    """Each method's training, then the step times of all."""

    def trained(name: str) -> Case:
        entry = ENTRIES[name]
        search = Search() if scale == "tiny" else Search(factors=(0.5, 1.0, 2.0), seeds=entry.seeds)

        def run(place: Place) -> Figures:
            out = place.runs(f"finetuning-{scale}", name)
            return searched(_config(scale, place, entry), entry.method, out, search)

        return Case(name=name, scale=WORDS[scale], run=run)

    def stepped(place: Place) -> Figures:
        config = {name: _config(scale, place, entry) for name, entry in ENTRIES.items()}
        contenders = {name: _whole(name, config[name], place) for name in ("full", "lora", "badam")}
        for name in ("blocks, top then below", "blocks, every weight"):
            contenders |= _by_block(config[name], ENTRIES[name].blocks, place)
        for step in contenders.values():
            step()
        return interleaved(contenders, "full", rounds=ROUNDS[scale])

    return [*map(trained, ENTRIES), Case(name="step time", scale=WORDS[scale], run=stepped)]


def _config(scale: str, place: Place, entry: Entry) -> RunConfig:
    model, data = data_folder(place, MODEL), Path(data_folder(place, "banking77"))
    there = [f"labelled.source={_every(TRAIN_EVERY, data / 'train.csv', place.work)}"]
    there += [f"labelled.validation={_every(VALIDATION_EVERY, data / 'test.csv', place.work)}"]
    there += [f"labelled.tokenizer={model}", f"model.path={model}"]
    return RunConfig.load(CONFIG, [*there, *entry.overrides, *OVERRIDES[scale], f"device={place.device}"])


def _every(step: int, whole: Path, folder: Path) -> Path:
    """A file of every `step`-th row: the rows lie sorted by class, so it has all of them."""
    few = folder.resolve() / f"banking77-{whole.stem}.csv"
    if not few.exists():
        few.parent.mkdir(parents=True, exist_ok=True)
        partial = few.with_suffix(".partial")
        with whole.open(newline="") as rows, partial.open("w", newline="") as part:
            csv.writer(part).writerows(itertools.islice(csv.reader(rows), 0, None, step))
        partial.replace(few)
    return few


# -- step times -------------------------------------------------------------------------------------------------------


def _whole(name: str, config: RunConfig, place: Place) -> Contender:
    """A step of full training or of a peer, over a whole cycle where it switches what it trains."""
    method = find_method(name, place.device)
    changed = method.change(config, 10_000, build(config, place.work).geometry)
    if method.adapter is None:
        context = build(changed, place.work)
        return steps_of(context, context.partition[0])
    return steps_of_external(method.adapter, changed, place.work, visit=VISIT)


def _by_block(config: RunConfig, called: str, place: Place) -> dict[str, Contender]:
    """A step in each block that the schedule visits, as it is and from stored hidden states."""
    context = build(config, place.work)
    found: dict[str, Contender] = {}
    for index in context.visited_blocks:
        block = context.trained[index]
        found[f"{called} {index}"] = steps_of(context, block)
        level = block.boundary
        if sum(
            len(owned) for owned in context.partition.chain.owned[1:level]
        ):  # an embedding alone is not worth storing
            found[f"{called} {index}, cached"] = steps_of(context, block, level=level)
    return found


# -- table ------------------------------------------------------------------------------------------------------------


def table(results: Results) -> str:
    """A line a method."""
    text = ""
    for scale in sorted({record["scale"] for record in results.values()}):
        found = {name: results[key]["figures"] for name in ENTRIES if (key := f"{name} [{scale}]") in results}
        if "full" not in found:
            continue
        steps = results.get(f"step time [{scale}]", {}).get("figures", {}).get("steps", {})
        cost = {name: timing["ratio"] for name, timing in steps.items()}
        rows = [_row(name, figures, found["full"], cost) for name, figures in found.items()]
        headings = ["method", "rate", "seeds", "steps", "last loss", "accuracy, %", "B-F", "time to full's last loss"]
        more = ["memory, of full's", "peak, of full's", "rates: last loss"]
        text += f"{scale}\n\n" + markdown([*headings, *more], rows) + "\n"
    return text


def _row(name: str, figures: Figures, full: Figures, cost: Mapping[str, float]) -> list[Any]:
    runs, first, whole = figures["runs"], figures["runs"][0], full["runs"]
    beside = list(zip(runs, whole, strict=False))
    found = [tokens_to_reach(other["curve"][-1][1], [row[:2] for row in run["curve"]]) for run, other in beside]
    reached = [seen for seen in found if seen is not None]
    multiplier, time = "not reached", "not reached"
    if len(reached) == len(found):
        multiplier = spread([seen / other["tokens"] for seen, (_, other) in zip(reached, beside, strict=True)], 2)
        times = [
            time_to(name, run, seen, cost, called=ENTRIES[name].blocks)
            for seen, (run, _) in zip(reached, beside, strict=True)
            if cost
        ]
        time = spread([mine / whole[0]["steps"] for mine in times], 2) if cost else None
    trials = ", ".join(f"{lr:g}: {'diverged' if loss is None else f'{loss:.3f}'}" for lr, loss in figures["search"])
    return [
        name,
        f"{figures['lr']:g}",
        len(runs),
        first["steps"],
        spread([run["curve"][-1][1] for run in runs], 3),
        spread([100 * run["accuracy"] for run in runs], 1),
        *(multiplier, time),
        *(first[key] / whole[0][key] for key in ("memory_bytes", "peak_bytes")),
        trials,
    ]


def time_to(name: str, run: Figures, tokens: float, cost: Mapping[str, float], *, called: str = "block") -> float:
    """What a run's steps cost until it had seen `tokens`: see `spent`."""
    return spent(name, run, tokens * run["steps"] / run["tokens"], cost, called=called)


EXPERIMENT = Experiment(name="finetuning", cases=cases, table=table)

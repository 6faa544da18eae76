"""The other tools on the same model: step time, tracked peak memory, loss at equal tokens and at equal time.

Equal time is not the clock's, which a busy machine disturbs: a method's step takes its interleaved share of a full
step, and its curve is read where the cheapest method's steps are over.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rivals  # noqa: F401 - registers the adapters
from runner import Case, Experiment, Figures, Place, Results, markdown
from stepping import Contender, interleaved, steps_of, steps_of_external
from tabling import spread
from training import loss_after, searched

from blocktrain.compare.adapter import ADAPTERS
from blocktrain.compare.compare import Search
from blocktrain.compare.methods import method as find_method
from blocktrain.errors import BlocktrainError
from blocktrain.report.multiplier import tokens_to_reach
from blocktrain.train.config import RunConfig
from blocktrain.train.context import build
from blocktrain.units import format_bytes


class Entry(NamedTuple):
    """A row of the table. method: of `blocktrain compare`. seeds: of its best rate, beyond the tiny scale."""

    method: str
    overrides: tuple[str, ...] = ()
    seeds: int = 1


ENTRIES: dict[str, Entry] = {
    "full": Entry("full", seeds=3),
    "bcd": Entry("bcd", seeds=3),
    "bcd, moments kept": Entry("bcd", ("optimizer.state=host",)),
    "badam": Entry("badam", seeds=3),
    "lisa": Entry("lisa", seeds=3),
    "galore": Entry("galore", seeds=3),
    "apollo": Entry("apollo", seeds=3),
    "lomo": Entry("lomo", seeds=3),
    "adalomo": Entry("adalomo"),
    "offload": Entry("offload"),
}
OVERRIDES = {
    "tiny": ("schedule.visit=2 steps", "schedule.sweeps=1", "model.config.n_embd=16", "batch.rows=2"),
    "short": (),
    "card": (
        "model.config.n_layer=12", "model.config.n_embd=768", "model.config.n_head=12", "model.config.n_positions=1024",
        "text.row_tokens=1024", "schedule.visit=100 steps", "schedule.sweeps=4", "batch.rows=16",
    ),
}  # fmt: skip
WORDS = {
    "tiny": "tiny, only to see that it runs",
    "short": "0.70M parameters, 180 steps of 1,024 tokens, three rates each",
    "card": "86M parameters, 1,200 steps of 16k tokens, one rate each",
}
FACTORS = {"tiny": (1.0,), "short": (1.0, 2.0, 4.0), "card": (1.0,)}
ROUNDS = {"tiny": 1, "short": 9, "card": 9}
CONFIG = Path(__file__).with_name("peers.toml")


def cases(scale: str) -> Sequence[Case]:
    """Each method's training, then the step times of all."""

    def trained(name: str) -> Case:
        entry = ENTRIES[name]
        search = Search(factors=FACTORS[scale], seeds=entry.seeds if scale == "short" else 1)

        def run(place: Place) -> Figures:
            out = place.runs(f"peers-{scale}", name)
            return searched(_config(scale, place, entry), entry.method, out, search)

        return Case(name=name, scale=WORDS[scale], run=run)

    def stepped(place: Place) -> Figures:
        here = [name for name, entry in ENTRIES.items() if _can_run(entry.method, place)]
        contenders = {name: _contender(ENTRIES[name], _config(scale, place, ENTRIES[name]), place) for name in here}
        for step in contenders.values():
            step()  # moments, projections
        return interleaved(contenders, "full", rounds=ROUNDS[scale])

    return [*map(trained, ENTRIES), Case(name="step time", scale=WORDS[scale], run=stepped)]


def _config(scale: str, place: Place, entry: Entry) -> RunConfig:
    return RunConfig.load(CONFIG, [*OVERRIDES[scale], *entry.overrides, f"device={place.device}"])


def _can_run(method: str, place: Place) -> bool:
    """Whether its package is installed and takes this device."""
    adapter = ADAPTERS.get(method)
    if adapter is None:
        return True
    if adapter.cuda_only is not None and place.device.type != "cuda":
        return False
    return adapter.module is None or importlib.util.find_spec(adapter.module.partition(".")[0]) is not None


def _contender(entry: Entry, config: RunConfig, place: Place) -> Contender:
    """A step of one method; of ours, the mean of a step in each block."""
    method = find_method(entry.method, place.device)
    theirs = method.change(config, 10_000, build(config, place.work).geometry)
    return _ours(theirs, place) if method.adapter is None else steps_of_external(method.adapter, theirs, place.work)


def _ours(config: RunConfig, place: Place) -> Contender:
    context = build(config, place.work)
    if context.data.row_tokens is None:
        raise BlocktrainError("this comparison is for text")
    steps = [steps_of(context, block) for block in context.partition]
    return lambda: statistics.mean(step() for step in steps)


def table(results: Results) -> str:
    """A line a method; the lowest figure of each column in bold, whoever's it is."""
    text = ""
    for scale in sorted({record["scale"] for record in results.values()}):
        found = {name: results[key]["figures"] for name in ENTRIES if (key := f"{name} [{scale}]") in results}
        if "full" not in found:
            continue
        timing = results.get(f"step time [{scale}]", {}).get("figures", {}).get("steps", {})
        ratios = {name: timing[name]["ratio"] for name in found if timing.get(name, {}).get("ratio")}
        rows = [_row(name, figures, found["full"], ratios) for name, figures in found.items()]
        _embolden(rows, columns=(4, 5, 6, 7, 8))
        headings = ["method", "update", "rate", "seeds", "loss, equal tokens", "loss, equal time", "step / full"]
        more = [
            "peak, tracked",
            "optimizer state",
            "multiplier, same optimizer",
            "against another",
            "rates tried: last loss",
        ]
        text += f"{scale}\n\n" + markdown([*headings, *more], rows) + "\n"
    return text


def _row(name: str, figures: Figures, full: Figures, ratios: Mapping[str, float]) -> list[Any]:
    runs = figures["runs"]
    first = runs[0]
    at_equal_time = None
    if name in ratios:
        seen = first["tokens"] * min(ratios.values()) / ratios[name]
        at_equal_time = statistics.mean(loss_after(run["curve"], seen) for run in runs)
    losses = [run["curve"][-1][1] for run in runs]
    reached = [
        tokens_to_reach(whole["curve"][-1][1], [(seen, loss) for seen, loss, _ in run["curve"]])
        for run, whole in zip(runs, full["runs"], strict=False)
    ]
    tokens = full["runs"][0]["tokens"]
    multiplier = "not reached" if None in reached else spread([seen / tokens for seen in reached], 2)
    if figures is full:
        multiplier = None
    same = first["optimizer"] == full["runs"][0]["optimizer"]
    trials = ", ".join(f"{lr:g}: {'diverged' if loss is None else f'{loss:.3f}'}" for lr, loss in figures["search"])
    shown = [name, first["optimizer"], f"{figures['lr']:g}", len(runs), (statistics.mean(losses), spread(losses, 3))]
    cost = [ratios.get(name), first["peak_bytes"], first["optimizer_bytes"]]
    return [*shown, at_equal_time, *cost, *((multiplier, None) if same else (None, multiplier)), trials]


def _embolden(rows: list[list], *, columns: Sequence[int]) -> None:
    """Show the figures of `columns`, the lowest of each in bold; a pair is a figure and how it is shown."""
    for column in columns:
        values = [row[column][0] if isinstance(row[column], tuple) else row[column] for row in rows]
        known = [value for value in values if value is not None]
        for row, value in zip(rows, values, strict=True):
            if value is None:
                continue
            plain = format_bytes(value) if column in (7, 8) else f"{value:.3f}"
            shown = row[column][1] if isinstance(row[column], tuple) else plain
            row[column] = f"**{shown}**" if value == min(known) else shown


EXPERIMENT = Experiment(name="peers", cases=cases, table=table)

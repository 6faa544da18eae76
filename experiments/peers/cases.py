"""The other tools on the same model: step time, tracked peak memory, loss at equal tokens and at equal time."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from runner import Case, Experiment, Figures, Place, Results, markdown
from stepping import Contender, interleaved, timed

from blocktrain.baselines.compare import compare
from blocktrain.baselines.methods import METHODS
from blocktrain.baselines.peers import PEERS
from blocktrain.baselines.session import whole_job
from blocktrain.baselines.step import take_step
from blocktrain.errors import BlocktrainError
from blocktrain.report.run import RunRecord
from blocktrain.report.standing import standings
from blocktrain.train.config import RunConfig
from blocktrain.train.job import build
from blocktrain.units import format_bytes

NAMES = ("full", "bcd", "badam", "lisa", "galore", "apollo", "lomo")
ON_CARD = (*NAMES, "adalomo", "offload")
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
    "short": "1.23M parameters, 150 steps of 256 tokens, one seed, one rate each",
    "card": "86M parameters, 1,200 steps of 16k tokens, one seed, one rate each",
}
ROUNDS = {"tiny": 1, "short": 9, "card": 9}
CONFIG = Path(__file__).with_name("peers.toml")


def cases(scale: str) -> Sequence[Case]:
    """The comparison, then the step times."""

    def config(place: Place) -> RunConfig:
        return RunConfig.load(CONFIG, [*OVERRIDES[scale], f"device={place.device}"])

    def trained(place: Place) -> Figures:
        names = _here(place)
        comparison = compare(config(place), names, place.work / ("peers" if scale == "short" else f"peers-{scale}"))
        runs = [RunRecord.load(folder.path) for folder in comparison.folders]
        rates = {trial.method: trial.lr for trial in comparison.trials}
        return {"methods": [{**asdict(item), "lr": rates[item.name]} for item in standings(runs, names)]}

    def stepped(place: Place) -> Figures:
        contenders = {name: _contender(name, config(place), place) for name in _here(place)}
        for step in contenders.values():
            step()  # moments, projections
        return interleaved(contenders, "full", rounds=ROUNDS[scale])

    words = WORDS[scale]
    return [Case(name="comparison", scale=words, run=trained), Case(name="step time", scale=words, run=stepped)]


def _here(place: Place) -> list[str]:
    """The methods that this device and these packages can run."""
    names = []
    for name in ON_CARD if place.device.type == "cuda" else NAMES:
        peer = PEERS.get(name)
        if peer is None or peer.module is None or importlib.util.find_spec(peer.module.partition(".")[0]):
            names.append(name)
        else:
            print(f"{name}: {peer.package} is not installed, left out")
    return names


def _contender(name: str, config: RunConfig, place: Place) -> Contender:
    """A step of one method; of ours, the mean of a step in each block."""
    job = build(config, place.work)
    theirs = METHODS[name].change(config, 10_000, job.pace)
    if METHODS[name].peer is None:
        return _ours(theirs, place)
    peer = PEERS[name]
    job = whole_job(theirs, place.work)
    trainee = peer.build(job, None)
    taken = iter(range(10_000))
    return lambda: timed(job.device, lambda: take_step(job, trainee, next(taken)))


def _ours(config: RunConfig, place: Place) -> Contender:
    job = build(config, place.work)
    if job.task.row_tokens is None:
        raise BlocktrainError("this comparison is for text")
    batch = {key: value.to(job.device) for key, value in job.task.train.batch(range(config.batch.rows)).items()}

    def step() -> None:
        job.task.loss(job.model, batch).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()

    def run() -> float:
        spent = []
        for block in job.partition:
            with job.optimizer.visit(block):
                step()
                spent.append(timed(job.device, step))
        return sum(spent) / len(spent)

    return run


def table(results: Results) -> str:
    """A line a method; the lowest figure of each column in bold, whoever's it is."""
    text = ""
    for record in results.values():
        if record["case"] != "comparison":
            continue
        timing = results.get(f"step time [{record['scale']}]", {}).get("figures", {}).get("steps", {})
        rows = []
        for item in record["figures"]["methods"]:
            step = timing.get(item["name"], {}).get("ratio")
            losses = [item["loss"], item["loss_at_equal_time"]]
            cost = [step, item["peak_bytes"], item["optimizer_bytes"], item["flops"] / 1e12]
            multipliers = [item["multiplier"], item["cross_multiplier"]]
            rows.append([item["name"], item["optimizer"], f"{item['lr']:g}", *losses, *cost, *multipliers])
        _embolden(rows, columns=(3, 4, 5, 6, 7, 8))
        headings = [
            "method",
            "update",
            "rate",
            "loss, equal tokens",
            "loss, equal time",
            "step / full",
            "peak, tracked",
        ]
        more = ["optimizer state", "TFLOPs, counted", "multiplier, same optimizer", "against full, another optimizer"]
        text += f"{record['scale']}\n\n" + markdown([*headings, *more], rows) + "\n"
    return text


def _embolden(rows: list[list], *, columns: Sequence[int]) -> None:
    for column in columns:
        known = [row[column] for row in rows if row[column] is not None]
        for row in rows:
            value = row[column]
            if value is None:
                continue
            shown = format_bytes(value) if column in (6, 7) else f"{value:.3f}"
            row[column] = f"**{shown}**" if value == min(known) else shown


EXPERIMENT = Experiment(name="peers", cases=cases, table=table)

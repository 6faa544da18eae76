"""Trains the same model on the same data by several methods, one after another, side by side in one report.

With a search, each method gets the same number of runs: one for each learning rate on the first seed, then the other
seeds at the rate whose validation loss ended lowest.

    OUT/METHOD                       a single run
    OUT/METHOD/lr-0.5-seed-0         one of a search
    OUT/trials.json                  every run's rate, seed and loss
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from blocktrain.compare.external_setup import is_finished, train_external
from blocktrain.compare.methods import Method, method
from blocktrain.errors import ConfigError, NonFiniteError
from blocktrain.outputs import write_output
from blocktrain.parallel.ranks import Ranks, open_ranks
from blocktrain.records.log import read_events
from blocktrain.runtime import pick_device
from blocktrain.train.config import RunConfig
from blocktrain.train.context import build
from blocktrain.train.run import resume, run
from blocktrain.train.run_folder import RunFolder
from blocktrain.train.trainer import Listener

# folder of the run -> its listeners
Listeners = Callable[[Path], Sequence[Listener]]


@dataclass(frozen=True, kw_only=True)
class Search:
    """factors: learning rates to try, as multiples of where each method starts. seeds: how many, from the
    configuration's on."""

    factors: tuple[float, ...] = (1.0,)
    seeds: int = 1

    def __post_init__(self) -> None:
        if not self.factors or not all(0 < factor < math.inf for factor in self.factors):
            raise ConfigError(f"a search needs positive factors of the learning rate, not {self.factors}")
        if len(set(self.factors)) < len(self.factors):
            raise ConfigError(f"a search has each factor once, not {self.factors}")
        if self.seeds < 1:
            raise ConfigError(f"seeds must be at least 1, not {self.seeds}")

    @property
    def single(self) -> bool:
        """Whether each method has one run."""
        return len(self.factors) * self.seeds == 1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a search. loss: of the last validation, in nats per token or image; None where it diverged."""

    method: str
    lr: float
    factor: float
    seed: int
    loss: float | None
    folder: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Every run, and the folder of each method's best: at its best rate, on the first seed."""

    trials: tuple[Trial, ...]
    folders: tuple[RunFolder, ...]


def compare(
    config: RunConfig,
    methods: Sequence[str],
    out: Path,
    *,
    search: Search = Search(),
    listeners: Listeners = lambda folder: (),
    command: str = "",
) -> Comparison:
    """Train `config` with each of `methods` into `out/<method>`, for the same number of steps.

    A comparison that was interrupted continues where it stopped when it is called again with the same configuration.
    """
    device = pick_device(config.device)
    chosen = {name: method(name, device) for name in methods}
    if len(chosen) < len(methods):
        raise ConfigError(f"methods {', '.join(methods)}: one is named twice")
    context = build(
        replace(config, optimizer=replace(config.optimizer, state="drop")), out
    )  # touches no moments in `out`
    steps, geometry = context.total_steps, context.geometry
    del context  # each method builds its own model
    if steps is None:
        raise ConfigError("a comparison needs a known number of steps: set schedule.sweeps or stop.duration")
    trials, folders = [], []
    with open_ranks(config.device, timeout_seconds=config.distributed.timeout_seconds) as ranks:
        external = next((name for name, each in chosen.items() if each.adapter is not None), None)
        if external is not None and ranks.size > 1:
            raise ConfigError(
                f"method '{external}' trains in one process, and there are {ranks.size}; leave torchrun out"
            )
        for name, each in chosen.items():
            changed = each.change(config, steps, geometry)
            runs = _Runs(name, each, changed, out, search, listeners, command, ranks)
            mine = [runs.trial(factor, config.seed) for factor in search.factors]
            best = min(mine, key=lambda trial: math.inf if trial.loss is None else trial.loss)
            if best.loss is None:
                raise NonFiniteError(f"every run of method '{name}' diverged; lower optimizer.lr")
            mine += [runs.trial(best.factor, config.seed + more) for more in range(1, search.seeds)]
            trials += mine
            folders.append(RunFolder(out / best.folder))
        if ranks.is_rank0:
            write_output(out / "trials.json", json.dumps([asdict(trial) for trial in trials], indent=1) + "\n")
    return Comparison(trials=tuple(trials), folders=tuple(folders))


@dataclass(frozen=True)
class _Runs:
    """The runs of one method."""

    name: str
    method: Method
    config: RunConfig  # the method's own, before the search changes its rate and its seed
    out: Path
    search: Search
    listeners: Listeners
    command: str
    ranks: Ranks

    def trial(self, factor: float, seed: int) -> Trial:
        """Train, continue, or find the run finished."""
        lr = self.config.optimizer.lr * factor
        config = replace(self.config, seed=seed, optimizer=replace(self.config.optimizer, lr=lr))
        place = Path(self.name) if self.search.single else Path(self.name) / f"lr-{factor:g}-seed-{seed}"
        folder = RunFolder(self.out / place)
        try:
            self._train(config, folder)
            loss = last_loss(folder)
        except NonFiniteError:
            if self.search.single:
                raise
            loss = math.nan
        found = loss if math.isfinite(loss) else None  # a run that skips such steps ends with one
        return Trial(method=self.name, lr=lr, factor=factor, seed=seed, loss=found, folder=str(place))

    def _train(self, config: RunConfig, folder: RunFolder) -> None:
        state = self.ranks.rank0_broadcast(lambda: _state_of(folder, config))
        if state == "finished":
            return
        heard, adapter = self.listeners(folder.path), self.method.adapter
        if adapter is not None:
            train_external(config, adapter, folder.path, method=self.name, listeners=heard, command=self.command)
        elif state == "begun":
            resume(folder.path, listeners=heard)
        else:
            run(config, folder.path, method=self.method.recorded, listeners=heard, command=self.command)


def _state_of(folder: RunFolder, config: RunConfig) -> Literal["new", "begun", "finished"]:
    """Raises `ConfigError` where the folder holds another run."""
    if not (folder.path / "run.json").exists():
        return "new"
    if folder.config() != config:
        raise ConfigError(f"'{folder.path}' holds a run with another configuration; choose another --out")
    return "finished" if is_finished(folder) else "begun"


def last_loss(folder: RunFolder) -> float:
    """The last validation loss of a run."""
    return [float(event["loss"]) for event in read_events(folder.events) if event["kind"] == "evaluation"][-1]

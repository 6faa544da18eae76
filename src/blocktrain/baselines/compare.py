"""The same model, data, tokens and evaluation under several methods, one after another, side by side in one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from blocktrain.baselines.methods import method
from blocktrain.dist.ranks import open_ranks
from blocktrain.errors import ConfigError
from blocktrain.train.config import RunConfig
from blocktrain.train.folder import RunFolder
from blocktrain.train.job import build
from blocktrain.train.loop import Listener
from blocktrain.train.session import resume, run

# name of the method -> listeners of its run
Listeners = Callable[[str], Sequence[Listener]]


def compare(
    config: RunConfig, methods: Sequence[str], out: Path, *, listeners: Listeners = lambda name: (), command: str = ""
) -> list[RunFolder]:
    """Train `config` with each of `methods` into `out/<method>`, for the same number of steps.

    A comparison that was interrupted goes on where it stopped when called again with the same configuration.
    """
    chosen = {name: method(name) for name in methods}
    if len(chosen) < len(methods):
        raise ConfigError(f"methods {', '.join(methods)}: one is named twice")
    job = build(replace(config, optimizer=replace(config.optimizer, state="drop")), out)  # touches no moments in `out`
    steps = job.total_steps
    if steps is None:
        raise ConfigError("a comparison needs a known number of steps: set schedule.sweeps or stop.duration")
    folders = []
    with open_ranks(config.device, timeout_seconds=config.distributed.timeout_seconds) as ranks:
        for name, change in chosen.items():
            folder = out / name
            theirs = change(config, steps, job.pace)
            if ranks.first(lambda folder=folder, theirs=theirs: _begun(folder, theirs)):
                folders.append(resume(folder, listeners=listeners(name)))
            else:
                folders.append(run(theirs, folder, method=name, listeners=listeners(name), command=command))
    return folders


def _begun(folder: Path, config: RunConfig) -> bool:
    """Whether the comparison was there already; raises `ConfigError` where another run is."""
    if not (folder / "run.json").exists():
        return False
    if RunFolder(folder).config() != config:
        raise ConfigError(f"'{folder}' holds a run with another configuration; choose another --out")
    return True

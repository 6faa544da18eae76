"""Methods by name, each a change of the configuration: everything else stays the same, so that a comparison is fair.

bcd, uncached                      ours
full                               full training with the configured optimizer
full-adamw, full-sgd, full-muon    full training with another one
lisa, badam, ...                   another package's trainer, for as many steps on the same rows (`adapter.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from blocktrain.compare.adapter import ADAPTERS, Adapter
from blocktrain.data.sampling import Sampling
from blocktrain.errors import ConfigError, nearest
from blocktrain.train.config import RunConfig, ScheduleConfig
from blocktrain.units import BatchGeometry, Duration

# (configuration, optimizer steps of the whole run, what a step consumes) -> configuration of the method
Change = Callable[[RunConfig, int, BatchGeometry], RunConfig]

# Where a search for the learning rate starts, over AdamW's (SGD's .1 is to Adam's 1e-3 as in the paper's settings).
RATES: Mapping[str, float] = {"SGD": 100.0}
# What each class needs to be trained with as its users do; Muon's scale makes it take AdamW's rate.
OPTIONS: Mapping[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD": {"momentum": 0.9},
    "Muon": {"adjust_lr_fn": "match_rms_adamw"},
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train.

    change: how it changes the configuration.
    recorded: what its records call it.
    adapter: what trains in place of our own modules, for another package's method.
    """

    change: Change
    recorded: str
    adapter: Adapter | None = None


def bcd(config: RunConfig, steps: int, geometry: BatchGeometry) -> RunConfig:
    """Block coordinate descent, as configured."""
    return config


def uncached(config: RunConfig, steps: int, geometry: BatchGeometry) -> RunConfig:
    """Block coordinate descent without a prefix cache, to show what the cache saves."""
    return replace(config, name=f"{config.name}, uncached", prefix=replace(config.prefix, store="off"))


def full(config: RunConfig, steps: int, geometry: BatchGeometry) -> RunConfig:
    """Ordinary full-parameter training: one block, visited once for the whole run, with the same optimizer, on fresh
    rows throughout (subsets that are reused are a means of block coordinate descent), evaluated at the same steps."""
    whole = Duration.steps(steps)
    return replace(
        _in_steps(config, steps, geometry),
        name=f"{config.name}, full",
        blocks=replace(config.blocks, count=1, largest=None, patterns=None),
        schedule=ScheduleConfig(visit=whole, sweeps=1),
    )


def full_with(name: str) -> Change:
    """Full training with another class of `torch.optim`, at a rate usual for it."""

    def change(config: RunConfig, steps: int, geometry: BatchGeometry) -> RunConfig:
        whole = full(config, steps, geometry)
        mine = config.optimizer
        rate = mine.lr * RATES.get(name, 1.0) / RATES.get(mine.name, 1.0)
        options = mine.options if name == mine.name else OPTIONS[name]
        optimizer = replace(whole.optimizer, name=name, lr=rate, options=options)
        return replace(whole, name=f"{whole.name}, {name}", optimizer=optimizer)

    return change


def external(name: str, adapter: Adapter) -> Change:
    """Another package's method, at its usual rate; it gets the configured blocks and visits, should it have any."""

    def change(config: RunConfig, steps: int, geometry: BatchGeometry) -> RunConfig:
        plain = _in_steps(config, steps, geometry)
        visit = Duration.steps(config.schedule.visit.in_steps(geometry))
        rate = config.optimizer.lr * adapter.rate / RATES.get(config.optimizer.name, 1.0)
        return replace(
            plain,
            name=f"{config.name}, {name}",
            schedule=replace(config.schedule, visit=visit, first_visits=(), sweeps=None, span="block", plateau=None),
            optimizer=replace(plain.optimizer, lr=rate),
        )

    return change


def _in_steps(config: RunConfig, steps: int, geometry: BatchGeometry) -> RunConfig:
    """`steps` steps on fresh rows, evaluated when `config` says, which may count in subsets."""
    return replace(
        config,
        sampling=Sampling(),
        prefix=replace(config.prefix, store="off"),
        stop=replace(config.stop, duration=Duration.steps(steps)),
        learning_rate=replace(config.learning_rate, visit_warmup_steps=0),
        optimizer=replace(config.optimizer, state="drop", tail="none"),
        evaluation=replace(config.evaluation, every=Duration.steps(config.evaluation.every.in_steps(geometry))),
        checkpoint=replace(config.checkpoint, every=Duration.steps(config.checkpoint.every.in_steps(geometry))),
    )


METHODS: dict[str, Method] = {
    "bcd": Method(change=bcd, recorded="bcd"),
    "full": Method(change=full, recorded="full"),
    "uncached": Method(change=uncached, recorded="uncached"),
    **{f"full-{name.lower()}": Method(change=full_with(name), recorded="full") for name in OPTIONS},
}


def method(name: str, device: torch.device) -> Method:
    """The method called `name`: one of `METHODS`, or one that an import of the configuration has registered.

    Raises `ConfigError` that names the nearest one, or what it lacks to run on `device`.
    """
    if name in METHODS:
        return METHODS[name]
    if name not in ADAPTERS:
        raise ConfigError(
            f"method '{name}' is unknown; {nearest(name, [*METHODS, *ADAPTERS])}. Methods of other packages are "
            "registered by a module that the configuration imports, such as imports = ['rivals'] with the repository's "
            "experiments/ on PYTHONPATH"
        )
    adapter = ADAPTERS[name]
    adapter.require(name, device)
    return Method(change=external(name, adapter), recorded=name, adapter=adapter)

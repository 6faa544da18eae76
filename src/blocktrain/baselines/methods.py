"""Methods by name, each a change of the configuration: everything else stays the same, so that a comparison is fair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from blocktrain.data.sampling import Sampling
from blocktrain.errors import ConfigError, nearest
from blocktrain.train.config import RunConfig
from blocktrain.units import Duration

# (configuration, optimizer steps of the whole run) -> configuration of the method
Method = Callable[[RunConfig, int], RunConfig]


def bcd(config: RunConfig, steps: int) -> RunConfig:
    """Block coordinate descent, as configured."""
    return config


def full(config: RunConfig, steps: int) -> RunConfig:
    """Ordinary full-parameter training: one block, visited once for the whole run, with the same optimizer, on fresh
    rows throughout (subsets that are reused are a means of block coordinate descent)."""
    whole = Duration.steps(steps)
    return replace(
        config,
        name=f"{config.name}, full",
        sampling=Sampling(variants=config.sampling.variants),
        blocks=replace(config.blocks, count=1, patterns=None),
        schedule=replace(config.schedule, visit=whole, sweeps=1, order="ascending", plateau=None),
        stop=replace(config.stop, duration=whole),
        learning_rate=replace(config.learning_rate, visit_warmup_steps=0),
        optimizer=replace(config.optimizer, state="drop"),
    )


METHODS: dict[str, Method] = {"bcd": bcd, "full": full}


def method(name: str) -> Method:
    """The method called `name`; raises `ConfigError` naming the nearest one."""
    if name not in METHODS:
        raise ConfigError(f"method '{name}' is unknown; {nearest(name, METHODS)}")
    return METHODS[name]

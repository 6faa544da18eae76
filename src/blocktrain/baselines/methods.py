"""Methods by name, each a change of the configuration: everything else stays the same, so that a comparison is fair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from blocktrain.data.sampling import Sampling
from blocktrain.errors import ConfigError, nearest
from blocktrain.train.config import RunConfig
from blocktrain.units import Duration, Pace

# (configuration, optimizer steps of the whole run, what a step consumes) -> configuration of the method
Method = Callable[[RunConfig, int, Pace], RunConfig]


def bcd(config: RunConfig, steps: int, pace: Pace) -> RunConfig:
    """Block coordinate descent, as configured."""
    return config


def uncached(config: RunConfig, steps: int, pace: Pace) -> RunConfig:
    """The same without a prefix cache: what it really saves."""
    return replace(config, name=f"{config.name}, uncached", prefix=replace(config.prefix, store="off"))


def full(config: RunConfig, steps: int, pace: Pace) -> RunConfig:
    """Ordinary full-parameter training: one block, visited once for the whole run, with the same optimizer, on fresh
    rows throughout (subsets that are reused are a means of block coordinate descent), evaluated at the same steps."""
    whole = Duration.steps(steps)
    return replace(
        config,
        name=f"{config.name}, full",
        sampling=Sampling(),
        blocks=replace(config.blocks, count=1, largest=None, patterns=None),
        schedule=replace(config.schedule, visit=whole, sweeps=1, order="ascending", span="block", plateau=None),
        stop=replace(config.stop, duration=whole),
        learning_rate=replace(config.learning_rate, visit_warmup_steps=0),
        optimizer=replace(config.optimizer, state="drop", tail="none"),
        evaluation=replace(config.evaluation, every=Duration.steps(config.evaluation.every.in_steps(pace))),
        checkpoint=replace(config.checkpoint, every=Duration.steps(config.checkpoint.every.in_steps(pace))),
    )


METHODS: dict[str, Method] = {"bcd": bcd, "full": full, "uncached": uncached}


def method(name: str) -> Method:
    """The method called `name`; raises `ConfigError` naming the nearest one."""
    if name not in METHODS:
        raise ConfigError(f"method '{name}' is unknown; {nearest(name, METHODS)}")
    return METHODS[name]

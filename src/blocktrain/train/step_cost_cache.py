"""Remembers the counted costs of a step for other runs of the same process whose steps cost the same.

A search over learning rates opens a run for each rate, and a comparison opens the same model again and again. What
those runs count before their first step (see `step_costs.py`) depends on shapes, not on numbers, so it is remembered:

    model, blocks, optimizer, precision, memory, first batch    -> key -> counts
    name, seed, rate, schedule, evaluation, checkpoints         are no part of it

A table of the configuration is part of the key unless it is in `IGNORED_KEYS`, so a table that is added later can
cost a second count, but never give a run the counts of another one.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from blocktrain.runtime import to_device
from blocktrain.train.context import TrainingContext
from blocktrain.train.toml_dataclasses import to_mapping

T = TypeVar("T")

MAX_ENTRIES = 64  # counts that are remembered; each is a few kilobytes
IGNORED_KEYS = {
    *("name", "seed", "learning_rate", "log_every", "stop", "tracking", "on_nonfinite"),
    *("evaluation", "checkpoint", "prefix", "sampling"),  # they do not change what a step costs
    "data",  # the first batch is looked at instead
    *("schedule", "distributed"),  # what visits train, the layout and the number of processes are looked at instead
}

_counts: dict[tuple[str, str], Any] = {}  # by the name of the count and the key, the oldest first


def count_once(count: Callable[[TrainingContext], T], context: TrainingContext) -> T:
    """What `count(context)` returns, which is called only if it has not been called with an equal key."""
    key = (count.__name__, cost_key(context))
    if key not in _counts:
        while len(_counts) >= MAX_ENTRIES:
            del _counts[next(iter(_counts))]
        _counts[key] = count(context)
    return copy.deepcopy(_counts[key])


def cost_key(context: TrainingContext) -> str:
    """A digest of everything that FLOPs and peaks of a step depend on, and of nothing that they do not."""
    digest = hashlib.sha256()
    for each in _parts(context):
        digest.update(each if isinstance(each, bytes) else json.dumps(each, default=str).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _parts(context: TrainingContext) -> Iterator[object]:
    config = to_mapping(context.config, leave_out=IGNORED_KEYS)
    optimizer = {key: value for key, value in config["optimizer"].items() if key != "lr"}
    yield {key: value for key, value in config.items() if key not in IGNORED_KEYS} | {"optimizer": optimizer}
    yield [str(context.device), context.micro_rows, context.rank_rows]
    yield [context.config.distributed.layout, context.ranks.size]
    yield type(context.model).__qualname__
    for name, tensor in (*context.model.named_parameters(remove_duplicate=False), *context.model.named_buffers()):
        yield [name, str(tensor.dtype), str(tensor.device), list(tensor.shape)]
    for block in (*context.partition, *context.trained):
        yield [block.index, block.names, {name: str(block.rows.get(name)) for name in block.parameters}]
    for name, tensor in to_device(context.data.train.batch(range(context.micro_rows)), context.device).items():
        yield [name, str(tensor.dtype), list(tensor.shape)]  # a mask decides which code the model runs
        yield tensor.cpu().flatten().view(torch.uint8).numpy().tobytes()

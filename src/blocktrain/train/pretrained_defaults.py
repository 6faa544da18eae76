"""Defaults of a run that goes on from pretrained weights; those of the tables are for random ones.

The rate of the tables, 1e-3, is for small models from scratch. 2e-5 with a warm-up and a cosine is what published
recipes of full fine-tuning use (Alpaca, Llama 2); blocks of few parameters may stand more.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

RATE = {"optimizer.lr": 2e-5, "learning_rate.warmup_steps": 10}  # for Adam's kind of step
SHAPE = {"learning_rate.shape": "cosine"}  # for a run of known length
PRECISION = {"precision": "bf16-exact"}  # on a GPU


def pretrained_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys and values for what the configuration `values` leaves out; none where it begins at random weights.

    A key that is given always wins. Values of the wrong type are left for the configuration's own checks.
    """

    def table(name: str) -> Mapping[str, Any]:
        return found if isinstance(found := values.get(name), Mapping) else {}

    model, optimizer, schedule = table("model"), table("optimizer"), table("schedule")
    if model.get("path", "none") == "none" or model.get("weights", "pretrained") != "pretrained":
        return {}
    chosen: dict[str, Any] = {}
    if str(optimizer.get("name", "AdamW")).startswith("Adam"):
        chosen |= RATE
    if any(place.get(key, "none") != "none" for place, key in ((schedule, "sweeps"), (table("stop"), "duration"))):
        chosen |= SHAPE
    device = str(values.get("device", "auto"))
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu and optimizer.get("tail", "none") == "none":  # a learning tail needs fp32
        chosen |= PRECISION
    given = {f"{name}.{key}" for name in ("optimizer", "learning_rate") for key in table(name)} | values.keys()
    return {key: value for key, value in chosen.items() if key not in given}


def with_pretrained_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `values` with these keys set."""
    filled = copy.deepcopy(dict(values))
    for key, value in pretrained_defaults(values).items():
        table, _, name = key.rpartition(".")
        place = filled.setdefault(table, {}) if table else filled
        if isinstance(place, dict):  # the configuration's own checks refuse a value in place of a table
            place[name] = value
    return filled

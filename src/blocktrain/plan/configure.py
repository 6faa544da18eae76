"""The configuration with which `blocktrain train` runs a planned layout: as tables, and as TOML text."""

from __future__ import annotations

import json
import re
from typing import Any

from blocktrain.errors import ConfigError
from blocktrain.plan.fit import Candidate, Request
from blocktrain.plan.layout import Layout
from blocktrain.plan.spec import ModelSpec

HEAD = """# Written by `blocktrain plan`. {model} in {blocks} blocks on one {card}:
# the planned peak is {peak} of device memory, the planned time of a step is {step}.
# Choose your own text and tokenizer (text.tokenizer; bytes where it is left out) below; the model's vocabulary must be
# at least as large as the tokenizer's. The weights begin at random. To fine-tune, replace the keys of [model] by
# path = "..." (a folder or hub name): then the tokenizer is the one found there, unless text.tokenizer is set.
"""


def train_config(request: Request, chosen: Candidate) -> dict[str, Any]:
    """The configuration as nested tables; raises `ConfigError` for a layout that `blocktrain train` cannot run yet."""
    layout, spec = chosen.layout, request.spec
    rows = request.rows // layout.micro_rows * layout.micro_rows
    every = f"{max(1, min(500, chosen.steps))} steps"
    values = {
        "name": f"{spec.name.rsplit('/', maxsplit=1)[-1].removesuffix('.json')}-{layout.blocks}-blocks",
        **step_config(spec, layout, seq=request.seq, rows=rows),
        "schedule": {"order": "ascending", "visit": f"{chosen.visit_steps} steps"},
        "stop": {"duration": f"{chosen.steps} steps"},
        "learning_rate": {"shape": "cosine", "warmup_steps": max(1, min(100, chosen.steps // 10)), "final": 0.1},
        "evaluation": {"every": every},
        "checkpoint": {"every": every},
    }
    if layout.cache != "off":
        # The cached subset as a share of the training set, which is taken to be the tokens of the request.
        subset = chosen.visit_steps * request.rows * request.seq / request.cache_epochs
        rate = max(1e-6, min(1.0, float(f"{subset / request.tokens:.4g}")))
        values["sampling"] = {"scope": "sweep", "rate": rate}
        values["schedule"]["visit"] = f"{request.cache_epochs} epochs"
    return values


def step_config(spec: ModelSpec, layout: Layout, *, seq: int, rows: int) -> dict[str, Any]:
    """What decides a step: precision and the tables of model, data, blocks, cache, optimizer, memory and batch. Raises
    `ConfigError` for a layout that `blocktrain train` cannot run yet."""
    refusal = "'blocktrain train' cannot run this layout yet. It does not support"
    if layout.cards > 1:
        raise ConfigError(f"{refusal} several cards; plan with --gpus 1")
    if layout.method == "offload":
        raise ConfigError(f"{refusal} an optimizer on the host; plan with --method bcd")
    blocks: dict[str, Any] = {"count": layout.blocks} if layout.largest is None else {"largest": layout.largest}
    if layout.pieces != "layers":
        blocks["pieces"] = layout.pieces
    memory: dict[str, Any] = {
        "frozen": layout.frozen,
        "checkpointing": "layers" if layout.checkpointing == "layers" else "off",
    }
    if layout.loss_chunk is not None:
        memory["loss_chunk"] = layout.loss_chunk
    return {
        "precision": layout.precision.name,
        "text": {"source": "stdlib", "row_tokens": seq},
        "model": {"architecture": spec.architecture, "config": spec.settings()},
        "blocks": blocks,
        "prefix": {"store": {"off": "off", "device": "device", "host": "host", "disk": "file"}[layout.cache]},
        "optimizer": {
            "name": "AdamW",
            "lr": 1e-4,
            "weight_decay": 0.01,
            "state": layout.state if layout.blocks > 1 else "drop",
            "moments": layout.moments,
            "max_grad_norm": 1.0,
            "options": {"fused": True} if layout.moments == "fp32" else {},
        },
        "memory": memory,
        "batch": {"rows": rows, "micro_rows": layout.micro_rows},
    }


def toml(values: dict[str, Any], head: str = "") -> str:
    """The tables as TOML text, with plain values before tables as TOML requires."""
    return head + "\n".join(_lines(values, ""))


def _lines(values: dict[str, Any], prefix: str) -> list[str]:
    lines = [f"{_key(key)} = {_value(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{_key(key)}]", *_lines(value, f"{prefix}{_key(key)}.")]
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _value(value: Any) -> str:
    """A plain value or a list in TOML, whose infinity is spelled otherwise than JSON's."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)

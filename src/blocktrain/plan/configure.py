"""The configuration that `blocktrain train` runs, for a layout: TOML with the planned choices and their reasons."""

from __future__ import annotations

import json
from typing import Any

from blocktrain.errors import ConfigError
from blocktrain.plan.fit import Candidate, Request
from blocktrain.plan.layout import Layout

HEAD = """# Written by `blocktrain plan`. {model} in {blocks} blocks on one {card}:
# {peak} of device memory at the peak, {step} a step, planned.
# Choose your own text and tokenizer below; the model's vocabulary must be as large as the tokenizer's.
# Its weights are random: to fine-tune, put path = "..." (a folder or hub name) in place of [model]'s keys.
"""


def train_config(request: Request, chosen: Candidate) -> dict[str, Any]:
    """As nested tables; raises `ConfigError` for a layout that `blocktrain train` cannot run yet."""
    layout, spec = chosen.layout, request.spec
    lacking = [
        (layout.cards > 1, "more than one card; plan with --gpus 1"),
        (layout.method == "offload", "an optimizer on the host; plan with --method bcd"),
    ]
    for lacks, what in lacking:
        if lacks:
            raise ConfigError(f"'blocktrain train' does not run this layout yet: it has no {what}")
    rows = request.rows // layout.micro_rows * layout.micro_rows
    cached = layout.cache != "off"
    values: dict[str, Any] = {
        "name": f"{spec.name.rsplit('/', maxsplit=1)[-1].removesuffix('.json')}-{layout.blocks}-blocks",
        "precision": layout.precision.name,
        "text": {"source": "stdlib", "tokenizer": "bytes", "row_tokens": request.seq},
        "model": {"architecture": spec.architecture, "config": spec.settings()},
        "blocks": _blocks(layout),
        "schedule": {"order": "ascending", "visit": f"{chosen.visit_steps} steps"},
        "stop": {"duration": f"{chosen.steps} steps"},
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
        "memory": _memory(layout),
        "learning_rate": {"shape": "cosine", "warmup_steps": max(1, min(100, chosen.steps // 10)), "final": 0.1},
        "batch": {"rows": rows, "micro_rows": layout.micro_rows},
        "evaluation": {"every": f"{max(1, min(500, chosen.steps))} steps"},
        "checkpoint": {"every": f"{max(1, min(500, chosen.steps))} steps"},
    }
    if cached:
        values["sampling"] = {"scope": "sweep", "rate": _rate(request, chosen)}
        values["schedule"]["visit"] = f"{request.cache_epochs} epochs"
    return values


def _blocks(layout: Layout) -> dict[str, Any]:
    if layout.largest is not None:
        return {"largest": layout.largest}
    return {"count": layout.blocks} | ({"pieces": layout.pieces} if layout.pieces != "layers" else {})


def _memory(layout: Layout) -> dict[str, Any]:
    values: dict[str, Any] = {
        "frozen": layout.frozen,
        "checkpointing": "layers" if layout.checkpointing == "layers" else "off",
    }
    return values if layout.loss_chunk is None else values | {"loss_chunk": layout.loss_chunk}


def _rate(request: Request, chosen: Candidate) -> float:
    """The subset as a share of the tokens, which are taken to be the training set."""
    subset = chosen.visit_steps * request.rows * request.seq / request.cache_epochs
    return max(1e-6, min(1.0, float(f"{subset / request.tokens:.4g}")))


def toml(values: dict[str, Any], head: str = "") -> str:
    """The tables as text; plain values first, as TOML wants."""
    return head + "\n".join(_lines(values, ""))


def _lines(values: dict[str, Any], prefix: str) -> list[str]:
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += ["", f"[{prefix}{key}]", *_lines(value, f"{prefix}{key}.")]
    return lines

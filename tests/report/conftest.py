"""Run folders as the trainer would leave them, with curves that look like training; no model is trained."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blocktrain.records.log import EventLog

Event = dict[str, Any]
MakeRun = Callable[..., Path]

TOKENS_PER_STEP = 4096


def full_memory(parameters: int) -> dict[str, int]:
    return {
        "weights": 2 * parameters,
        "master": 4 * parameters,
        "gradients": 4 * parameters,
        "moments": 8 * parameters,
        "activations": 6_000_000,
    }


def block_memory(parameters: int, active: int, share_behind: float) -> dict[str, int]:
    return {
        "weights": 2 * parameters,
        "master": 4 * active,
        "gradients": 4 * active,
        "moments": 8 * active,
        "activations": int(6_000_000 * share_behind),
    }


def header(method: str, name: str, sizes: list[int], unit: str, planned: int) -> Event:
    blocks, layer = [], 0
    for index, size in enumerate(sizes):
        first = "embedding" if index == 0 else f"h.{layer}"
        last = "head" if index == len(sizes) - 1 else f"h.{layer + 1}"
        blocks.append({"index": index, "first": first, "last": last, "layers": 3, "parameters": size})
        layer += 2
    return {
        "kind": "run",
        "method": method,
        "name": name,
        "model": "GPT-2",
        "parameters": sum(sizes),
        "unit": unit,
        "tokens_per_step": TOKENS_PER_STEP,
        "rows_per_step": 32,
        "steps_planned": planned,
        "optimizer": "adamw",
        "precision": "bf16",
        "state": "drop",
        "blocks": blocks,
    }


def cost(sizes: list[int]) -> Event:
    """3F for a full step; block k of M costs F + F(M-k)/M + F/M, counted a little above the formula."""
    total, count = sum(sizes), len(sizes)
    forward = 2 * total * TOKENS_PER_STEP
    theory = [forward + forward * (count - k) // count + forward // count for k in range(count)]
    return {
        "kind": "cost",
        "flops": {
            "full": 3 * forward,
            "blocks": [int(flops * 1.007) for flops in theory],
            "theory_full": 3 * forward,
            "theory_blocks": theory,
        },
        "memory": {
            "full": full_memory(total),
            "blocks": [block_memory(total, size, (count - k) / count) for k, size in enumerate(sizes)],
        },
    }


def true_loss(tokens: float, speed: float) -> float:
    return 1.85 + 3.7 * math.exp(-tokens * speed / 90_000) + 1.1 * math.exp(-tokens * speed / 1_100_000)


class Writer:
    """Writes what a trainer would, visit by visit."""

    def __init__(self, folder: Path, *, seed: int, geometry: float, speed: float, per_token: float, unit: str):
        self.log = EventLog(folder / "events.jsonl")
        self.noise = np.random.default_rng(seed)
        self.geometry, self.speed, self.per_token, self.unit = geometry, speed, per_token, unit
        self.step, self.seconds, self.flops = 0, 0.0, 0
        self.last: Event = {}

    def now(self, **more: Any) -> Event:
        return {"step": self.step, "tokens": self.step * TOKENS_PER_STEP, "seconds": round(self.seconds, 3), **more}

    def write(self, kind: str, **more: Any) -> None:
        self.log.append({"kind": kind, **more})

    def evaluate(self, visit: int, block: int | None) -> None:
        loss = true_loss(self.step * TOKENS_PER_STEP, self.speed) + 0.03 + self.noise.normal(0, 0.004)
        tokens = self.unit == "tokens"
        self.last = {
            "loss": loss * self.per_token,
            "loss_per_byte": loss if tokens else None,
            "accuracy": None if tokens else 1 / (1 + loss),
        }
        self.write("evaluation", **self.now(visit=visit, block=block), **self.last)
        self.seconds += 0.4

    def train(self, steps: int, *, visit: int, sweep: int, block: int, every: int, bad: set[int]) -> None:
        for done in range(steps):
            self.step += 1
            self.seconds += self.geometry * (1 + 0.05 * self.noise.normal())
            loss = true_loss(self.step * TOKENS_PER_STEP, self.speed) + self.noise.normal(0, 0.06)
            loss = float("nan") if self.step in bad else loss * self.per_token
            rate = 3e-4 * min(1, (done + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * done / steps))
            norm = abs(0.8 + 0.3 * self.noise.normal()) + 3 * math.exp(-done / 8)
            skipped = self.step in bad
            where = {"visit": visit, "sweep": sweep, "block": block}
            self.write("step", **self.now(**where), loss=loss, lr=rate, grad_norm=norm, skipped=skipped)
            if self.step % every == 0:
                self.evaluate(visit, block)

    def cached(self, saved: int, where: Event) -> None:
        """At a visit's end: two thirds of the rows asked for were found stored."""
        self.write(
            "cached", place="file", dtype="bf16", bytes=2 * 2**20 + where["block"], rows=96, hits=64, computed=32,
            stale=0, damaged=0, fill_seconds=0.25, wait_seconds=0.0625, encoding_error=0.001 * where["block"],
            flops_saved=saved, seconds_saved=1.5, **where, **self.now(),
        )  # fmt: skip


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A function that writes a run folder and returns it."""

    def make(
        name: str = "shakespeare-bcd",
        *,
        method: str = "bcd",
        sizes: tuple[int, ...] = (500_000, 420_000, 380_000),
        sweeps: int = 3,
        steps: int = 100,
        every: int = 50,
        speed: float = 1.0,
        per_token: float = 1.0,
        unit: str = "tokens",
        bad: tuple[int, ...] = (),
        finish: bool = True,
        costs: bool = True,
        saved: int = 0,
    ) -> Path:
        """`saved` FLOPs a step by a prefix cache, in the blocks above the first."""
        folder = tmp_path / name.replace("/", "_")
        full = method == "full"
        geometry = 0.21 if full else 0.15
        writer = Writer(folder, seed=7 if full else 8, geometry=geometry, speed=speed, per_token=per_token, unit=unit)
        order = [(0, 0)] if full else [(sweep, block) for sweep in range(sweeps) for block in range(len(sizes))]
        planned = len(order) * steps
        writer.log.append(header(method, name, list(sizes), unit, planned))
        if costs:
            writer.log.append(cost(list(sizes)))
        writer.evaluate(0, None)
        flops = cost(list(sizes))["flops"]
        for visit, (sweep, block) in enumerate(order):
            where: Event = {"visit": visit, "sweep": sweep, "block": block}
            writer.write("visit", **where, **writer.now())
            writer.write("poem", visit=visit, lines=3)  # a kind the report does not know
            if saved and block:
                writer.write("cache", **where, **writer.now(), place="file", reason="store = 'file'", level=2 * block)
            if not finish and visit == len(order) - 1:
                writer.train(max(1, steps // 2), **where, every=every, bad=set(bad))
                break
            writer.train(steps, **where, every=every, bad=set(bad))
            writer.flops += steps * (flops["full"] if full else flops["blocks"][block])
            if saved and block:
                writer.flops -= steps * saved
                writer.cached(steps * saved, where)
            writer.write("retire", visit=visit, block=block, **writer.now(), reason="100 steps done")
        else:
            writer.write(
                "end", reason="finished", steps=writer.step, tokens=writer.step * TOKENS_PER_STEP, sweeps=sweeps,
                seconds=writer.seconds, **writer.last, optimizer_bytes=8 * max(sizes), flops=writer.flops,
                peak_memory_bytes=300 * 2**20,
            )  # fmt: skip
        writer.log.close()
        details = {
            "config": {"lr": 3e-4},
            "environment": {"torch": "2"},
            "command": "blocktrain train",
            "started": "2026-01-02",
        }
        (folder / "run.json").write_text(json.dumps(details))
        return folder

    return make

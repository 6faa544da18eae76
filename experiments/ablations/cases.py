"""What is compared: models and lengths, and methods as overrides of `ablation.toml`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and how long it is trained: full training `steps`, others 1.5 times as many unless they say."""

    result: str
    steps: int
    rates: tuple[float, ...]
    overrides: tuple[str, ...] = ()

    @property
    def writer(self) -> str:
        """Who writes its table in the log."""
        return f"ablation.py, {self.result}"


LONG = (
    "schedule.visit=100 steps",
    "evaluation.every=100 steps",
    "evaluation.rows=256",
    "checkpoint.every=1000 steps",
)
HELD = ("learning_rate.shape=wsd", "learning_rate.decay_share=0.3")
WIDE = ("model.config.n_embd=384", "model.config.n_head=6")
SIZES = {
    "0.7M": Size(result="result.json", steps=400, rates=(2e-3, 1e-3, 4e-3)),
    "0.7M-long": Size(
        result="long.json",
        steps=2000,
        rates=(2e-3, 1e-3, 4e-3),
        overrides=LONG,
    ),
    "0.7M-warm": Size(
        result="warm.json",
        steps=2000,
        rates=(4e-3, 2e-3, 8e-3),
        overrides=(*LONG, "learning_rate.warmup_steps=200"),
    ),
    "0.4M-deep": Size(
        result="deep.json",
        steps=4000,
        rates=(4e-3, 8e-3, 2e-3),
        overrides=(
            *LONG,
            "model.config.n_layer=8",
            "model.config.n_embd=64",
            "model.config.n_positions=128",
            "text.row_tokens=128",
            *HELD,
            "learning_rate.warmup_steps=200",
        ),
    ),
    "11M": Size(
        result="large.json",
        steps=200,
        rates=(1e-3, 5e-4, 2e-3),
        overrides=(*WIDE, "batch.rows=8", "evaluation.rows=64"),
    ),
    "11M-long": Size(
        result="wide.json",
        steps=1000,
        rates=(5e-4, 1e-3, 2e-3, 2.5e-4),
        overrides=(
            *LONG,
            *WIDE,
            *HELD,
            "learning_rate.warmup_steps=100",
        ),
    ),
}
MUON = ["optimizer.name=Muon", 'optimizer.options.adjust_lr_fn="match_rms_adamw"']
TAIL = ["optimizer.tail=newton-schulz", "optimizer.tail_share=0.3"]
FOUR = ["blocks.count=4", "blocks.pieces=modules", "schedule.order=[0, 1, 2]"]
IN_BACKWARD = ["optimizer.in_backward=true", "optimizer.max_grad_norm=none"]
HALVES = [*IN_BACKWARD, "blocks.count=2", "blocks.pieces=modules"]
GROWN = [*IN_BACKWARD, "model.zero_residuals=true"]
COPIED = "model.grown_layers=copied"
THREE_OF_EIGHT = 'blocks.patterns=[["embedding", "*.h.[0-2]"], ["*.h.[3-5]"], ["*.h.[67]", "head"]]'
METHODS: dict[str, list[str]] = {
    "full": ["blocks.count=1"],
    "blocks, M=3": [],
    "suffix, M=3": ["schedule.span=suffix"],
    "tail sgd, M=3": ["optimizer.tail=sgd"],
    "tail newton-schulz, M=3": ["optimizer.tail=newton-schulz"],
    "tail newton-schulz, thrice the share, M=3": TAIL,
    "the same, top block left to the tail": [*TAIL, "schedule.order=[0, 1]"],
    "the same, M=4": [*TAIL, "blocks.count=4", "schedule.order=[0, 1, 2]"],
    "the same, M=4 of modules": [*TAIL, *FOUR],
    "suffix, M=2": ["schedule.span=suffix", "blocks.count=2"],
    "suffix, M=4 of modules, without the top": ["schedule.span=suffix", *FOUR],
    "blocks, M=2 of modules, in the backward pass": HALVES,
    "block 0 of 3 of modules for four fifths, then 1 and 2, in the backward pass": [
        *IN_BACKWARD,
        "blocks.pieces=modules",
        "schedule.order=[0, 0, 0, 0, 0, 0, 0, 0, 1, 2]",
        "schedule.visit=260 steps",
        "stop.duration=2600 steps",
    ],
    "two halves in turns": [*HALVES, "stop.duration=5200 steps"],
    "two halves, grown: block 0 for two thirds": [
        *HALVES,
        *GROWN,
        'schedule.first_visits=["3900 steps", "300 steps"]',
        "stop.duration=5800 steps",
    ],
    "two halves, grown: block 0 for three quarters": [
        *HALVES,
        *GROWN,
        'schedule.first_visits=["4800 steps", "300 steps"]',
        "stop.duration=6400 steps",
    ],
    "three blocks, grown: block 0 for 0.7": [
        *GROWN,
        THREE_OF_EIGHT,
        'schedule.first_visits=["4500 steps", "300 steps", "300 steps"]',
        "stop.duration=6400 steps",
    ],
    "three blocks of modules, grown: 0.6 of 1,300 steps in the first visit": [
        *GROWN,
        "blocks.pieces=modules",
        'schedule.first_visits=["800 steps", "100 steps", "100 steps"]',
        "stop.duration=1300 steps",
    ],
    "three blocks of modules, grown by copies: 0.6 of 1,500 steps in the first visit": [
        *GROWN,
        COPIED,
        "blocks.pieces=modules",
        'schedule.first_visits=["900 steps", "100 steps", "100 steps"]',
        "stop.duration=1500 steps",
    ],
    "a model of two layers": ["blocks.count=1", "model.config.n_layer=2"],
    "full, Muon": ["blocks.count=1", *MUON],
    "Muon, tail newton-schulz, M=4 of modules": [*TAIL, *FOUR, *MUON],
}

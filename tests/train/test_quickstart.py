"""The quickstart is what the documentation says: the cost of a step by theory, the size of the moments, its length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktrain.records.log import Event
from blocktrain.schedule import Cyclic
from blocktrain.train import step_costs as opening_module
from blocktrain.train.config import RunConfig
from blocktrain.train.context import TrainingContext, build
from blocktrain.train.step_costs import count_opening, run_header
from blocktrain.units import Duration

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart.toml"
SUFFIX = Cyclic(visit=Duration.steps(80), sweeps=3, span="suffix")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingContext, Event]:
    """The context of the example, and its cost record."""
    folder = tmp_path_factory.mktemp("quickstart")
    context = build(RunConfig.load(EXAMPLE, [f"text.cache={folder}", "device=cpu"]), folder)
    return context, count_opening(context, run_header(context, "bcd")).costs.to_event()


def in_suffixes(context: TrainingContext) -> TrainingContext:
    """The same context with suffix visits."""
    config = replace(context.config, schedule=replace(context.config.schedule, span="suffix"))
    return replace(context, config=config, schedule=SUFFIX)


def closed_form(active: range, *, layers: int, width: int, vocabulary: int, tokens: int, rows: int) -> int:
    """FLOPs of a step from the model's dimensions alone, with layer 0 the embedding and layer `layers` + 1 the head.

    Per token, forward: 24 width^2 in a layer's weights, 4 tokens width in its attention, 2 width vocabulary in the
    head (tied: its weight gradient belongs to layer 0). Backward: activation gradients cost as much again as the
    weights' forward and 2.5 times the attention's; weight gradients as much as the weights' forward.
    """
    weights, attention, head = 24 * width**2, 4 * tokens * width, 2 * width * vocabulary
    trained = len([layer for layer in active if 0 < layer <= layers])
    above = layers + 1 - max(active.start, 1)
    per_token = (
        layers * (weights + attention)
        + head
        + above * (weights + 2.5 * attention)
        + head
        + trained * weights
        + (head if 0 in active else 0)
    )
    return round(per_token * tokens * rows)


def test_a_step_in_blocks_costs_what_theory_says(quickstart: tuple[TrainingContext, Event]) -> None:
    """M = 3, uncached: counted FLOPs over a full step's at most 2 % above the theoretical value."""
    context, cost = quickstart
    settings: Any = context.model.config
    shape = {
        "layers": settings.n_layer,
        "width": settings.n_embd,
        "vocabulary": settings.vocab_size,
        "tokens": 128,
        "rows": context.geometry.rows_per_step,
    }
    chain = context.partition.chain.layers
    full = closed_form(range(len(chain)), **shape)
    assert cost["flops"]["full"] == pytest.approx(full, rel=0.02)
    ratios, theory = [], []
    for block, counted in zip(context.partition, cost["flops"]["blocks"], strict=True):
        start = chain.index(block.layers[0])
        ratios.append(counted / cost["flops"]["full"])
        theory.append(closed_form(range(start, start + len(block.layers)), **shape) / full)
        assert ratios[-1] <= 1.02 * theory[-1]
        assert ratios[-1] >= 0.98 * theory[-1]
    assert sum(ratios) <= 1.02 * sum(theory)


def test_a_tail_costs_a_suffix_visits_flops_and_no_state(
    quickstart: tuple[TrainingContext, Event], tmp_path: Path
) -> None:
    context, alone = quickstart
    cache = context.config.data.cache  # pyright: ignore[reportAttributeAccessIssue]
    overrides = [f"text.cache={cache}", "device=cpu", "optimizer.tail=sgd"]
    tail = opening_module._costs(build(RunConfig.load(EXAMPLE, overrides), tmp_path)).to_event()
    suffix = opening_module._costs(in_suffixes(context)).to_event()
    assert tail["flops"]["blocks"] == suffix["flops"]["blocks"]
    assert tail["flops"]["theory_blocks"] == suffix["flops"]["theory_blocks"]
    for mine, theirs in zip(tail["memory"]["blocks"], alone["memory"]["blocks"], strict=True):
        assert (mine["moments"], mine["master"]) == (theirs["moments"], theirs["master"])
        assert theirs["activations"] <= mine["activations"]


def test_a_suffix_visit_costs_what_theory_says(quickstart: tuple[TrainingContext, Event]) -> None:
    """The block and every block above it; at block 0, a full step exactly."""
    context, _ = quickstart
    suffix = in_suffixes(context)
    cost = opening_module._costs(suffix).to_event()
    flops = cost["flops"]
    assert flops["blocks"][0] == flops["full"]
    assert flops["theory_blocks"] == pytest.approx(flops["blocks"], rel=0.02)
    settings: Any = context.model.config
    chain = context.partition.chain.layers
    for block, counted in zip(context.partition, flops["blocks"], strict=True):
        active = range(chain.index(block.layers[0]), len(chain))
        theory = closed_form(
            active,
            layers=settings.n_layer,
            width=settings.n_embd,
            vocabulary=settings.vocab_size,
            tokens=128,
            rows=context.geometry.rows_per_step,
        )
        assert counted == pytest.approx(theory, rel=0.02)
    moments = [8 * block.num_parameters + 4 * len(block.parameters) for block in suffix.trained]
    assert [memory["moments"] for memory in cost["memory"]["blocks"]] == moments


def test_it_is_short_and_still_a_training(quickstart: tuple[TrainingContext, Event]) -> None:
    """It once took 720 steps of a larger model, 18 TFLOP, and ten minutes on busy cores. One core of 2026 does some 60
    GFLOP a second here, so 5 TFLOP are less than two minutes, evaluations included."""
    context, cost = quickstart
    schedule = context.config.schedule
    assert schedule.sweeps is not None
    assert schedule.sweeps >= 2
    assert schedule.visit.unit == "steps"
    assert schedule.sweeps * schedule.visit.value * sum(cost["flops"]["blocks"]) < 5e12


def test_the_optimizer_holds_the_largest_blocks_moments(quickstart: tuple[TrainingContext, Event]) -> None:
    """Two fp32 moments a parameter, and a step count of 4 bytes a tensor."""
    context, cost = quickstart
    expected = [8 * block.num_parameters + 4 * len(block.parameters) for block in context.partition]
    assert [memory["moments"] for memory in cost["memory"]["blocks"]] == expected
    assert cost["memory"]["full"]["moments"] == sum(expected)

"""What a timed step runs."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch
from stepping import interleaved, steps_of, timed

from blocktrain.train.context import build
from blocktrain.train.techniques.growth import growing_visits


def test_a_step_of_a_growing_model_is_timed_without_the_layers_it_leaves_out(tiny, tmp_path: Path) -> None:
    context = build(tiny("model.zero_residuals=true"), tmp_path)
    visit, layers = next(growing_visits(context))
    ran = []
    for layer in layers:
        for module in layer.modules.values():
            next(module.children()).register_forward_hook(lambda *_, name=layer.name: ran.append(name))
    assert steps_of(context, visit.block, without=layers)() > 0
    assert not ran
    steps_of(context, visit.block)()
    assert set(ran) == {layer.name for layer in layers}


def test_what_is_timed_is_the_step() -> None:
    def step() -> None:
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass

    assert timed(torch.device("cpu"), step) >= 0.05
    assert timed(torch.device("cpu"), lambda: None) < 0.05


def test_a_ratio_is_taken_within_its_round() -> None:
    """Every claim about time is such a ratio: a machine that is twice as slow in a round is so for all."""
    slowness = (1.0, 2.0, 10.0, 4.0, 1.0)
    steps = {"full": (8.0, 8.0, 8.0, 8.0, 8.0), "mine": (4.0, 6.0, 2.0, 5.0, 8.0), "same": (8.0, 8.0, 8.0, 8.0, 8.0)}
    seconds = {
        name: iter([step * slow for step, slow in zip(took, slowness, strict=True)]) for name, took in steps.items()
    }
    found = interleaved({name: partial(next, each) for name, each in seconds.items()}, "full", rounds=5)
    assert found["rounds"] == 5
    assert found["steps"]["mine"] == {"ms": 12_000, "ratio": 5 / 8, "quartiles": [4 / 8, 6 / 8]}
    assert found["steps"]["full"] == {"ms": 16_000, "ratio": 1, "quartiles": [1, 1]}
    assert found["steps"]["same"]["ratio"] == 1


@pytest.mark.parametrize("base", ["full", None])
def test_what_runs_out_of_memory_drops_out(base: str | None) -> None:
    def lost() -> float:
        raise torch.OutOfMemoryError

    calls = []
    contenders = {"full": lost, "mine": lambda: calls.append("mine") or 2.0}
    found = interleaved(contenders, base, rounds=3)["steps"]
    assert found["full"] == {"ms": None, "ratio": None, "reason": "out of memory"}
    assert found["mine"] == {"ms": 2000, "ratio": None, "quartiles": None}
    assert len(calls) == 3

    def broken() -> float:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        interleaved({"full": broken}, "full", rounds=1)

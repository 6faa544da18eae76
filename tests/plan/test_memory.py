"""Planned peaks against a tracker's: twelve recorded ones, and live ones of small models."""

import json
from pathlib import Path
from typing import Any

import pytest

from blocktrain.plan.layout import Layout, find_precision
from blocktrain.plan.memory import memory
from blocktrain.plan.presets import find_model
from blocktrain.train.tracked import tracked_peak

TRACKED = Path(__file__).resolve().parents[2] / "benchmarks" / "plan" / "tracked.json"
CASES = json.loads(TRACKED.read_text())["cases"]


def layout_of(case: dict[str, Any]) -> Layout:
    return Layout(
        blocks=case["blocks"],
        precision=find_precision(case["precision"]),
        micro_rows=case["rows"],
        checkpointing="layers" if case["checkpointing"] else "none",
        cache="host" if case["cached"] else "off",
    )


def test_the_recorded_cases_are_those_asked_for() -> None:
    assert len(CASES) == 12
    assert {case["blocks"] for case in CASES} == {1, 3, 8, 32}
    assert {case["checkpointing"] for case in CASES} == {case["cached"] for case in CASES} == {True, False}
    assert {"gpt2", "llama-3-70b"} <= {case["model"] for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_peak_is_within_one_per_cent_of_the_recorded_one(case: dict[str, Any]) -> None:
    planned = memory(find_model(case["model"]), layout_of(case), seq=case["seq"])
    assert planned.peak == pytest.approx(case["peak_bytes"], rel=0.01)
    assert all(size >= 0 for size in planned.parts.values())


def test_the_tracker_counts_what_pytorchs_own_counts() -> None:
    both = [case for case in CASES if "memtracker_middle_block_bytes" in case]
    assert len(both) == 3
    for case in both:
        middle = case["peak_bytes_by_block"][str(case["blocks"] // 2)]
        assert middle == pytest.approx(case["memtracker_middle_block_bytes"], rel=0.001)


def test_a_live_case() -> None:
    """GPT-2 with three blocks, checkpointed, on fake tensors, now."""
    spec = find_model("gpt2")
    layout = Layout(blocks=3, micro_rows=2, checkpointing="layers")
    assert memory(spec, layout, seq=256).peak == pytest.approx(
        max(tracked_peak(spec, layout, seq=256).values()), rel=0.02
    )


def test_every_lever_does_what_it_is_for() -> None:
    spec = find_model("llama-2-7b")

    def peak(**changes) -> float:
        return memory(
            spec, Layout(**{"blocks": 3, "precision": find_precision("bf16-exact"), **changes}), seq=1024
        ).peak

    assert peak(blocks=8) < peak() < peak(blocks=1, method="full")
    assert peak(checkpointing="layers", micro_rows=4) < peak(micro_rows=4) < peak(micro_rows=8)
    assert peak(pipeline=2) < peak()
    assert peak(data=4, shards=4) < peak(data=4)
    assert peak(method="offload", blocks=1) < peak(method="full", blocks=1)

"""Runs that cost the same share their counts, and no others do."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.records.run_records import Opening
from blocktrain.train import step_cost_cache
from blocktrain.train.context import TrainingContext, build
from blocktrain.train.step_cost_cache import cost_key
from blocktrain.train.step_costs import count_opening, run_header


def opening_of(context: TrainingContext) -> Opening:
    return count_opening(context, run_header(context, "bcd"))


ALIKE = [
    "name=other",
    "seed=7",
    "optimizer.lr=0.5",
    "learning_rate.warmup_steps=1",
    "schedule.sweeps=3",
    "evaluation.rows=4",
    "checkpoint.keep=1",
    "stop.target_loss=1.0",
]
OTHER = [
    "model.config.n_layer=3",
    "model.config.attn_pdrop=0.0",
    "blocks.count=2",
    "blocks.frozen_dropout=true",
    "batch.rows=8",
    "batch.micro_rows=2",
    "text.row_tokens=8",
    "schedule.span=suffix",
    "optimizer.name=SGD",
    "optimizer.weight_decay=0.0",
    "optimizer.tail=sgd",
    "precision=bf16",
    "memory.checkpointing=layers",
]


@pytest.mark.parametrize("override", ALIKE)
def test_what_a_step_does_not_depend_on_is_no_part_of_it(tiny, tmp_path: Path, override: str) -> None:
    assert cost_key(build(tiny(override), tmp_path)) == cost_key(build(tiny(), tmp_path))


@pytest.mark.parametrize("override", OTHER)
def test_what_it_depends_on_is(tiny, tmp_path: Path, override: str) -> None:
    assert cost_key(build(tiny(override), tmp_path)) != cost_key(build(tiny(), tmp_path))


def test_a_run_that_costs_the_same_has_the_counts_that_it_would_have_made(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = build(tiny(*ALIKE[1:]), tmp_path)
    opening_of(build(tiny(), tmp_path))
    shared = opening_of(other)
    monkeypatch.setattr(step_cost_cache, "_counts", {})
    assert opening_of(other) == shared


def test_each_is_counted_once_and_a_caller_may_change_what_it_gets(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_cost_cache, "_counts", {})
    counted: list[str] = []

    def count(context: TrainingContext) -> dict[str, int]:
        counted.append(context.config.name)
        return {"flops": 1}

    first, same, other = (
        build(tiny(*more), tmp_path) for more in ([], ["name=same"], ["blocks.count=2", "name=other"])
    )
    step_cost_cache.count_once(count, first)["flops"] = 2
    assert step_cost_cache.count_once(count, same) == {"flops": 1}
    step_cost_cache.count_once(count, other)
    assert counted == ["tiny", "other"]


def test_only_so_many_are_remembered(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost_cache, "_counts", {})
    monkeypatch.setattr(step_cost_cache, "MAX_ENTRIES", 1)
    contexts = [build(tiny(f"blocks.count={count}"), tmp_path) for count in (2, 3)]
    counted: list[int] = []
    for context in (*contexts, *contexts):
        step_cost_cache.count_once(lambda each: counted.append(len(each.partition)), context)
    assert counted == [2, 3, 2, 3]

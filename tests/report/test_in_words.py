"""A run in sentences: what was reached, what was saved and what it cost; the quoted figures are those measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from blocktrain.report.in_words import MULTIPLIERS_FROM_SCRATCH, in_words
from blocktrain.report.page import page
from blocktrain.report.run import RunRecord
from blocktrain.report.summary import summary

MakeRun = Callable[..., Path]

ROOT = Path(__file__).resolve().parents[2]


def sentences(folder: Path, **header: Any) -> tuple[str, ...]:
    run = RunRecord.load(folder)
    run = dataclasses.replace(run, header=dataclasses.replace(run.header, **header))
    return in_words(run, summary(run))


def test_a_run_in_blocks_says_what_was_saved_and_what_it_cost(make_run: MakeRun) -> None:
    """1.3 M parameters, the largest block 0.5 M: 16 bytes each in master, gradients and optimizer state."""
    reached, saved, cost = sentences(make_run(sweeps=2, steps=50))
    assert "all 1.3M parameters trained in 3 blocks; 6 visits, 300 steps" in reached
    assert "nats per byte (the loss at its start: 6." in reached
    assert "take 7.6 MiB instead of 19.8 MiB (62 % less) of it" in saved
    assert "of a full step's FLOPs (formula 0.667)" in saved
    assert "updated in 100 of 300 steps on average" in cost


def test_the_page_shows_a_command_as_code_and_the_terminal_in_backticks(make_run: MakeRun) -> None:
    folder = make_run("`a` <b>", sweeps=1, steps=10)
    assert "`blocktrain compare` measures it" in sentences(folder)[-1]
    html = page([RunRecord.load(folder)])
    assert "<code>blocktrain compare</code> measures it" in html
    assert "`a` &lt;b&gt;" in html
    assert html.count("<code>") == 1


def test_updates_are_weighted_by_parameters(make_run: MakeRun) -> None:
    """Interrupted half-way through the second visit, 50 steps of block 0 (400 k) and 25 of block 1 (100 k)."""
    folder = make_run(sizes=(400_000, 100_000), sweeps=1, steps=50, finish=False)
    assert "updated in 45 of 75 steps" in sentences(folder)[-1]


def test_full_training_saved_nothing_and_costs_nothing(make_run: MakeRun) -> None:
    (only,) = sentences(make_run("full", method="full", steps=20))
    assert "1.3M parameters trained in full; 20 steps" in only


@pytest.mark.parametrize("header", [{"span": "suffix"}, {"tail": "sgd"}])
def test_the_cost_of_plain_visits_is_not_claimed_of_others(make_run: MakeRun, header: dict[str, str]) -> None:
    """A suffix visit or a learning tail moves more weights than those of its block."""
    assert not any("updated in" in sentence for sentence in sentences(make_run(sweeps=1, steps=10), **header))


def test_a_log_without_costs_leaves_the_saving_out(make_run: MakeRun) -> None:
    assert [text.split()[0] for text in sentences(make_run(costs=False, sweeps=1, steps=10))] == ["GPT-2,", "The"]


def test_the_quoted_multipliers_are_the_measured_ones() -> None:
    large = json.loads((ROOT / "experiments" / "ablations" / "large.json").read_text())["rows"]
    books = json.loads((ROOT / "benchmarks" / "prefix" / "books.json").read_text())["steps"]
    ablation = 1 / fmean(row["tokens_of_plain"] for row in large if row["method"] == "full")
    assert pytest.approx((ablation, books["uncached"] / books["full"]), abs=0.05) == MULTIPLIERS_FROM_SCRATCH

"""Figures of a run: the memory and the visits that every table's shares are made of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import training
from training import figures_of, multiplier

import blocktrain as bt
from blocktrain.compare.compare import Comparison, Search, Trial
from blocktrain.report.run import RunRecord

KEPT = ("weights", "master", "gradients", "moments")


def test_the_memory_of_a_run_is_that_of_its_worst_visited_block(tiny, tmp_path: Path) -> None:
    """Moments included: they are what most methods differ in."""
    order = ("precision=bf16-exact", "schedule.order=[1, 0]", "optimizer.state=drop")
    run = RunRecord.load(bt.run(tiny(*order), tmp_path / "blocks").path)
    assert run.cost is not None
    assert run.memory_peaks is not None
    kept = [sum(run.cost.memory.blocks[block][part] for part in KEPT) for block in (0, 1)]
    peaks = [sum(run.memory_peaks.blocks[block].parts.values()) for block in (0, 1)]
    assert all(run.cost.memory.blocks[block]["moments"] for block in (0, 1))
    figures = figures_of(run)
    assert (figures["memory_bytes"], figures["peak_bytes"]) == (max(kept), max(peaks))
    assert figures["visits"] == [[1, 0, 4], [0, 4, 4]]
    assert [point[0] for point in figures["curve"]] == [row.tokens for row in run.evaluations]


def test_the_best_rate_is_one_that_did_not_diverge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny) -> None:
    def trial(factor: float, seed: int, loss: float | None) -> Trial:
        return Trial(method="full", factor=factor, lr=0.1 * factor, seed=seed, loss=loss, folder=f"{factor} {seed}")

    trials = [trial(1.0, 0, 2.0), trial(2.0, 0, 1.5), trial(4.0, 0, None), trial(2.0, 1, 1.0), trial(2.0, 2, None)]
    monkeypatch.setattr(training, "compare", lambda *_, **__: Comparison(trials=tuple(trials), folders=()))
    monkeypatch.setattr(training, "RunRecord", SimpleNamespace(load=lambda path: path.name))
    monkeypatch.setattr(training, "figures_of", lambda name: name)
    found = training.searched(tiny(), "full", tmp_path, Search(factors=(1.0, 2.0, 4.0), seeds=3))
    assert found["search"] == [[0.1, 2.0], [0.2, 1.5], [0.4, None]]
    assert (found["lr"], found["seeds"], found["runs"]) == (0.2, [0, 1], ["2.0 0", "2.0 1"])


def test_a_multiplier_is_read_at_full_trainings_last_loss() -> None:
    full = {"tokens": 100, "curve": [[0, 4.0, None], [100, 2.0, None]]}
    assert multiplier(full, {"curve": [[0, 4.0, None], [100, 3.0, None], [200, 1.0, None]]}) == pytest.approx(1.5)
    assert multiplier(full, {"curve": [[0, 4.0, None], [100, 3.0, None]]}) is None

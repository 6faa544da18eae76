"""The probe of the machine: rates of things that exist here, nothing left behind, and one clock for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blocktrain import probe
from blocktrain.probe import (
    best_seconds,
    copy_rates,
    file_rates,
    free_bytes,
    matmul_rates,
    measure_bandwidths,
    median_seconds,
)

CPU = torch.device("cpu")


def test_actions_take_turns_and_are_summed_up(monkeypatch: pytest.MonkeyPatch):
    """a takes 1, 5 and 3 seconds, b 2 each time; a first round is not timed."""
    now, order = [0.0], []
    takes = {"a": iter([100.0, 1.0, 5.0, 3.0] * 2), "b": iter([100.0, 2.0, 2.0, 2.0] * 2)}
    monkeypatch.setattr(probe.time, "perf_counter", lambda: now[0])

    def action(name: str):
        def run() -> None:
            order.append(name)
            now[0] += next(takes[name])

        return run

    actions = {name: action(name) for name in takes}
    assert median_seconds(actions, CPU, tries=3) == {"a": 3.0, "b": 2.0}
    assert order == ["a", "b"] * 4
    assert best_seconds(actions, CPU, tries=3) == {"a": 1.0, "b": 2.0}


def test_a_processor_copies_within_the_host_only():
    rates = copy_rates(CPU, copy_bytes=2**20, tries=1)
    assert set(rates) == {"host copy"}
    assert 1e6 < rates["host copy"] < 1e13


def test_files_are_written_and_read_and_go_away(tmp_path: Path):
    rates = file_rates(tmp_path, copy_bytes=2**20, tries=1)
    assert set(rates) == {"disk write", "disk read"}
    assert all(1e5 < rate < 1e13 for rate in rates.values())
    assert list(tmp_path.iterdir()) == []
    assert file_rates(tmp_path / "missing") == {}


def test_matrix_products_have_a_rate_for_each_training_dtype():
    rates = matmul_rates(CPU, width=32, tries=1)
    assert set(rates) == {torch.float32, torch.bfloat16}
    assert all(1e6 < rate < 1e15 for rate in rates.values())


def test_measured_rates_are_those_of_a_machine_that_exists(tmp_path: Path):
    rates = measure_bandwidths(CPU, tmp_path, probe_bytes=2**20)
    assert set(rates.read) == set(rates.write) == {"host", "file"}
    for rate in (*rates.read.values(), *rates.write.values()):
        assert 1e6 < rate < 1e13
    assert list(tmp_path.iterdir()) == []  # nothing of the probe stays


def test_a_folder_that_cannot_be_written_to_has_no_rate(tmp_path: Path):
    """A full disk ended the run here, though nothing was to be kept on it."""
    rates = measure_bandwidths(CPU, tmp_path / "missing", probe_bytes=2**16)
    assert set(rates.read) == set(rates.write) == {"host"}


def test_free_bytes(tmp_path: Path):
    free = free_bytes(CPU, tmp_path)
    assert set(free) == {"host", "file"}
    assert all(2**20 < room < 2**60 for room in free.values())

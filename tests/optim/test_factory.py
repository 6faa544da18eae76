"""Which optimizer class a configuration names, and which parameters it gets."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import blocktrain as bt
from blocktrain.errors import ConfigError, Interrupted
from blocktrain.optim.factory import find_optimizer_class
from blocktrain.records.log import read_events
from blocktrain.records.run_records import Record, Step


class CountedAdamW(torch.optim.AdamW):
    """AdamW that counts its steps: an optimizer class of one's own."""

    taken: ClassVar[int] = 0

    def step(self, closure=None):
        CountedAdamW.taken += 1
        return super().step(closure)


NOT_A_CLASS = CountedAdamW([torch.zeros(1)])


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in read_events(folder / "events.jsonl") if event["kind"] == "step"]


def test_a_run_trains_with_a_class_of_ones_own(tiny, tmp_path: Path) -> None:
    """The same losses as with the class that it derives from, and each step is its own."""
    bt.run(tiny("optimizer.name=AdamW"), tmp_path / "torch")
    CountedAdamW.taken = 0
    bt.run(tiny(f"optimizer.name={__name__}:CountedAdamW"), tmp_path / "own")
    assert losses(tmp_path / "own") == losses(tmp_path / "torch")
    assert len(losses(tmp_path / "own")) == 12
    assert CountedAdamW.taken >= 12


def test_a_run_with_a_class_of_ones_own_resumes(tiny, tmp_path: Path) -> None:
    """The path is stored in the run's configuration, and the class is imported again."""

    def stop(record: Record) -> None:
        if isinstance(record, Step) and record.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        bt.run(tiny(f"optimizer.name={__name__}:CountedAdamW"), tmp_path / "run", listeners=[stop])
    CountedAdamW.taken = 0
    bt.resume(tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 12
    assert CountedAdamW.taken >= 6


def test_names_of_optimizer_classes() -> None:
    assert find_optimizer_class("Muon") is torch.optim.Muon
    for name in (f"{__name__}:CountedAdamW", f"{__name__}.CountedAdamW"):
        assert find_optimizer_class(name) is CountedAdamW


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "AdamV": r"'AdamV' is neither a class of torch\.optim.*'package\.module:Class'; did you mean 'Adam",
        "LBFGS": r"'LBFGS' is neither a class of torch\.optim that can train a block",
        "Optimizer": r"'Optimizer' is neither a class of torch\.optim that can train a block",
        "torch.optim.AdamW": r"without its path, 'AdamW'",
        "torch.optim:LBFGS": r"'torch\.optim:LBFGS' is neither a class of torch\.optim that can train a block",
        "no_such_package:Lion": r"module 'no_such_package' cannot be imported \(No module named .* add its folder to",
        f"{__name__}:CountedAdam": r"'.*:CountedAdam' is not a subclass of .*; did you mean 'CountedAdamW'",
        f"{__name__}:NOT_A_CLASS": r"NOT_A_CLASS' is not a subclass of torch\.optim\.Optimizer",
        "json:JSONDecoder": r"is not a subclass of torch\.optim\.Optimizer in 'json'; it defines none",
        "": r"'' is neither a class of torch\.optim",
    }.items(),
)
def test_a_wrong_name_is_refused_with_the_way_out(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_optimizer_class(name)


def test_a_class_that_refuses_the_settings_is_named(tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r":CountedAdamW refuses these settings: .*'beta'"):
        bt.run(tiny(f"optimizer.name={__name__}:CountedAdamW", "optimizer.options.beta=3"), tmp_path / "run")

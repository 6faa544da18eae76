"""What a run from pretrained weights begins with, where its configuration does not say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from blocktrain.cli.main import main
from blocktrain.plan.configure import toml
from blocktrain.train.config import RunConfig
from blocktrain.train.pretrained_defaults import pretrained_defaults

FILE: dict[str, Any] = {
    "device": "cpu",
    "text": {"source": "stdlib"},
    "model": {"path": "mine"},
    "schedule": {"visit": "2 steps", "sweeps": 1},
}
ALL = {"optimizer.lr": 2e-5, "learning_rate.warmup_steps": 10, "learning_rate.shape": "cosine"}


def file_with(**tables: Any) -> dict[str, Any]:
    return copy.deepcopy(FILE) | tables


@pytest.mark.parametrize(
    ("tables", "chosen"),
    [
        ({}, ALL),
        ({"model": {"path": "mine", "weights": "random"}}, {}),
        ({"model": {"architecture": "gpt2"}}, {}),
        ({"optimizer": {"lr": 1e-3}}, {key: value for key, value in ALL.items() if key != "optimizer.lr"}),
        ({"optimizer": {"name": "SGD"}}, {"learning_rate.shape": "cosine"}),
        ({"learning_rate": {"shape": "constant", "warmup_steps": 0}}, {"optimizer.lr": 2e-5}),
        (
            {"schedule": {"visit": "2 steps", "sweeps": "none"}, "stop": {"hours": 1.0}},
            {"optimizer.lr": 2e-5, "learning_rate.warmup_steps": 10},
        ),
    ],
)
def test_what_is_chosen(tables: dict[str, Any], chosen: dict[str, Any]) -> None:
    """Every run began with a rate of 1e-3, constant, without a warm-up, which ruins pretrained weights."""
    values = file_with(**tables)
    assert pretrained_defaults(values) == chosen
    config = RunConfig.from_mapping(values)
    assert config.optimizer.lr == chosen.get("optimizer.lr", 1e-3)
    assert config.learning_rate.shape == chosen.get("learning_rate.shape", "constant")
    assert values == file_with(**tables), "the caller's tables are left alone"
    assert RunConfig.from_mapping(config.to_mapping()) == config


def test_on_a_gpu_masters_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert RunConfig.from_mapping(file_with(device="auto")).precision == "bf16-exact"
    assert RunConfig.from_mapping(file_with(device="cuda:1")).precision == "bf16-exact"
    assert RunConfig.from_mapping(file_with(device="cuda", precision="fp32")).precision == "fp32"
    assert RunConfig.from_mapping(file_with()).precision == "fp32"
    assert RunConfig.from_mapping(file_with(device="cuda", optimizer={"tail": "sgd"})).precision == "fp32"


def test_the_choice_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It comes before the model is looked for, which is not there."""
    file = tmp_path / "a.toml"
    file.write_text(toml(file_with(model={"path": "./nowhere"})))
    assert main(["train", str(file)]) == 2
    assert "defaults for pretrained weights: optimizer.lr = 2e-05" in capsys.readouterr().out.replace("\n", " ")

"""Keys of other trainers are answered with ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blocktrain.cli.main import main
from blocktrain.errors import ConfigError
from blocktrain.train.config_docs import tables
from blocktrain.train.familiar_names import OUR_NAMES
from blocktrain.train.toml_dataclasses import read_toml


def test_the_names_that_are_given_exist() -> None:
    keys = {f"{table.name}.{key.name}".lstrip(".") for table in tables() for key in table.keys}
    shared = {key.partition(".")[2] for key in keys}
    for familiar, answer in OUR_NAMES.items():
        (name,) = re.findall(r"^[a-z_.]+|^$", answer)
        assert name in keys or name in shared or name in ("the",), familiar


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rate=1e-4", "here 'learning_rate' is optimizer.lr;"),
        ("max_steps=10", "here 'max_steps' is stop.duration, such as \"1000 steps\";"),
        ("text.max_length=10", "unknown key 'text.max_length'; here 'max_length' is row_tokens"),
        ("optimizer.learning_rate=1", "unknown key 'optimizer.learning_rate'; here 'learning_rate' is optimizer.lr"),
        ("learning_rate.warmup_ratio=0.1", "'warmup_ratio' is learning_rate.warmup_steps, in steps"),
    ],
)
def test_a_familiar_name_is_answered_with_ours(tiny, override: str, message: str) -> None:
    """`learning_rate` was answered with "learning_rate is a table", `max_steps` with "did you mean 'memory'?"."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        tiny(override)


def test_a_whole_file_of_another_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text('model_name_or_path = "x"\nlearning_rate = 1e-4\nbf16 = true\n')
    assert main(["train", str(tmp_path / "a.toml")]) == 2
    found = capsys.readouterr().err
    assert "'model_name_or_path' is model.path; 'learning_rate' is optimizer.lr; 'bf16' is precision" in found


@pytest.mark.parametrize("name", ["a.yaml", "b.YML", "c.json"])
def test_a_file_that_is_not_toml_by_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=f"{name}' is not TOML, by its name: .* 'blocktrain init' writes"):
        read_toml(tmp_path / name)

"""`blocktrain init` writes a file that `train` reads."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from blocktrain.cli.main import main
from blocktrain.train.config import RunConfig


@pytest.mark.parametrize(
    ("words", "kind", "source"),
    [
        ([], "text", "stdlib"),
        (["--data", "my text.txt"], "text", "my text.txt"),
        (["--data", "mine.jsonl", "--model", "models/mine \U0001f600"], "chat", "mine.jsonl"),
        (["--data", "poems.txt", "--model", "mine"], "text", "poems.txt"),
        (["--data", "owner/name", "--model", "mine", "--kind", "labelled"], "labelled", "owner/name"),
    ],
)
def test_what_it_writes_is_a_configuration(words: list[str], kind: str, source: str, tmp_path: Path) -> None:
    file = tmp_path / "first \U0001f600 run.toml"
    assert main(["init", str(file), *words]) == 0
    config = RunConfig.load(file)
    assert (config.name, config.data_kind.name, config.data.source) == (file.stem, kind, source)  # pyright: ignore[reportAttributeAccessIssue]
    if "--model" in words:
        assert (config.model.path, config.optimizer.lr, config.learning_rate.shape) == (words[3], 2e-5, "cosine")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["there.toml"], "'there.toml' exists already; choose another name"),
        (["new.yaml"], "choose a name that ends in .toml"),
        (["new.toml", "--model", "mine"], "--model 'mine' is trained on what? Give --data"),
        (["new.toml", "--kind", "chat", "--data", "a.jsonl"], "--kind chat needs --model"),
    ],
)
def test_what_it_refuses(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").write_text("mine")
    assert main(["init", *words]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there.toml"]
    assert (tmp_path / "there.toml").read_text() == "mine"


def test_train_prints_the_whole_configuration(config_file: Path, tmp_path: Path, capsys) -> None:
    """What is printed is read back as the same run, and nothing is trained."""
    odd = ["--set", "optimizer.options.eps=1e-9", "--set", 'blocks.layers={"transformer.h"="layer", wte="x"}']
    before = sorted(tmp_path.rglob("*"))
    for words in ([], odd[:2]):
        assert main(["train", str(config_file), "--print-config", *words]) == 0
        printed = capsys.readouterr().out
        config = RunConfig.load(config_file, words[1::2])
        assert RunConfig.from_mapping(tomllib.loads(printed)) == config
    assert sorted(tmp_path.rglob("*")) == before

"""The tokenizer at `model.path` is the default wherever the model is found there.

A pretrained model with `[chat]`, `[labelled]` or `[text]` and no `tokenizer` key was trained on bytes, without a word,
and exported with a tokenizer of 257 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import blocktrain as bt
from blocktrain.chain.model_loading import ModelConfig
from blocktrain.cli.main import main
from blocktrain.data.chat import ChatConfig
from blocktrain.errors import DataError
from blocktrain.train.config import RunConfig
from blocktrain.train.config_tables import ScheduleConfig
from blocktrain.train.context import build

WORDS = ("[UNK]", "<end>", "user", "assistant", ":", "good", "bad", "film")
TABLES = {
    "text": "good film\n" * 200,
    "chat": '{"prompt": "good", "completion": "film"}\n' * 40,
    "labelled": '{"text": "good film", "label": "a"}\n{"text": "bad film", "label": "b"}\n' * 20,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved GPT-2 with a tokenizer of whole words."""
    folder = tmp_path_factory.mktemp("model")
    size: dict[str, Any] = {
        "n_layer": 2,
        "n_embd": 8,
        "n_head": 2,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    GPT2LMHeadModel(GPT2Config(vocab_size=300, **size)).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="<end>").save_pretrained(folder)
    return folder


def tables(kind: str, model: Path, tmp_path: Path, **model_keys: Any) -> dict[str, Any]:
    source = tmp_path / ("rows.txt" if kind == "text" else "rows.jsonl")
    source.write_text(TABLES[kind])
    row_tokens = {"row_tokens": 16}
    return {
        "device": "cpu",
        kind: {"source": str(source), "validation_share": 0.3, "cache": str(tmp_path / "cache"), **row_tokens},
        "model": {"path": str(model), **model_keys},
        "schedule": {"visit": "1 steps", "sweeps": 1},
        "blocks": {"count": 2},
        "batch": {"rows": 2},
    }


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_it_is_that_of_the_model(kind: str, weights: str, model: Path, tmp_path: Path) -> None:
    context = build(RunConfig.from_mapping(tables(kind, model, tmp_path, weights=weights)), tmp_path)
    assert context.tokenizer is not None
    assert (context.tokenizer.name, context.tokenizer.vocab_size) == (str(model), len(WORDS))


def test_the_run_says_so_and_exports_it(
    model: Path, uncounted: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from blocktrain.plan.configure import toml

    (tmp_path / "run.toml").write_text(toml(tables("text", model, tmp_path)))
    assert main(["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]) == 0
    assert f"tokenizer {model}" in "".join(capsys.readouterr().out.splitlines())
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["text"]["tokenizer"] == str(model)
    bt.resume(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    assert len(AutoTokenizer.from_pretrained(tmp_path / "exported")) == len(WORDS)


def test_an_architecture_has_bytes(tiny) -> None:
    assert tiny().data.tokenizer == "bytes"
    assert tiny("text.tokenizer=none").data.tokenizer == "bytes"


def test_a_key_that_is_given_is_kept(model: Path, tmp_path: Path) -> None:
    mapping = tables("text", model, tmp_path)
    mapping["text"]["tokenizer"] = "bytes"
    config: Any = RunConfig.from_mapping(mapping)
    assert config.data.tokenizer == "bytes"
    assert RunConfig.from_mapping(config.to_mapping()) == config


def test_a_configuration_made_in_python_has_it_too(model: Path) -> None:
    schedule = ScheduleConfig(visit=bt.Duration.steps(1), sweeps=1)
    config: Any = RunConfig(
        model=ModelConfig(path=str(model)), schedule=schedule, data=ChatConfig(source="conversations")
    )
    assert config.data.tokenizer == str(model)


@pytest.mark.parametrize("kind", TABLES)
def test_a_model_without_a_tokenizer_is_refused(kind: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((model / name).read_bytes())
    config = RunConfig.from_mapping(tables(kind, tmp_path / "bare", tmp_path))
    with pytest.raises(DataError, match=rf'no files of a tokenizer; set {kind}\.tokenizer = "bytes", or to a folder'):
        bt.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()

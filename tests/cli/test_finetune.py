"""`blocktrain finetune`: from a folder and data to a folder that answers, and what it refuses at once."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import pipeline

from blocktrain.chain import model_loading
from blocktrain.cli.main import main
from blocktrain.plan.hardware import calibration_file
from blocktrain.train.config import RunConfig
from blocktrain.train.run_folder import RunFolder

from ..run_events import events_of
from ..tiny_models import pretrained_folder

CONVERSATIONS = [{"question": f"1 + {number}?", "answer": f"{1 + number}"} for number in range(40)]
FILMS = [{"text": f"a {word} film {number}", "label": word} for number in range(16) for word in ("good", "bad")]
RATES = {"matmul_flops": {"2": 1e11, "4": 1e11}, "attention_flops": {"2": 1e10, "4": 1e10}} | {
    **dict.fromkeys(("memory_bytes", "update_scalars", "host_link_bytes", "host_memory_bytes", "disk_bytes"), 1e9),
    "kernel_seconds": 1e-6,
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, with rates of this machine that need not be measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    calibration_file().parent.mkdir(parents=True)
    stored = {"device": "cpu", "memory_bytes_total": 2.0**34, "rates": RATES, "date": "2026-11-22"}
    calibration_file().write_text(json.dumps(stored))
    return tmp_path


def lines(rows: list[dict[str, Any]]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


QUICK = ["--set", "device=cpu", "--max-tokens", "4k"]


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("kind", ["chat", "saved", "text", "labelled"])
def test_from_a_model_and_data_to_a_model_that_answers(kind: str, place: Path, capsys) -> None:
    data = place / {"chat": "data.jsonl", "saved": "data", "text": "data.txt", "labelled": "data.csv"}[kind]
    match kind:
        case "chat":
            data.write_text(lines(CONVERSATIONS))
        case "saved":
            Dataset.from_list(CONVERSATIONS).save_to_disk(str(data))
        case "text":
            data.write_text("Once upon a time there was a model. " * 300)
        case _:
            data.write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in FILMS))
    model = pretrained_folder(place / "tiny", "bert" if kind == "labelled" else "llama")
    assert main(["finetune", str(model), str(data), "--out", "run", *QUICK]) == 0
    out = capsys.readouterr().out
    assert f"{data} is [{'chat' if kind == 'saved' else kind}] (by " in out
    assert "fp32, 3 blocks (the fewest that fit, 3 or more), frozen weights on the device" in out
    assert "full training would take" in out
    assert "report  run/report.html" in out
    assert f"to {place / 'run' / 'model'}" in out
    evaluations = events_of(place / "run", "evaluation")
    assert len(evaluations) >= 4
    assert evaluations[0]["step"] == 0
    config = RunFolder(place / "run").config()
    assert (config.schedule.order, config.learning_rate.shape, config.optimizer.lr) == ("descending", "cosine", 2e-5)
    if kind == "labelled":
        (answer,) = pipeline("text-classification", model="run/model", device="cpu")("a good film")
        assert answer["label"] in ("good", "bad")
        return
    prompt: Any = "Once" if kind == "text" else [{"role": "user", "content": "1 + 1?"}]
    (answer,) = pipeline("text-generation", model="run/model", device="cpu")(prompt, max_new_tokens=2, do_sample=False)
    assert answer["generated_text"]


def test_the_configuration_is_an_ordinary_one(place: Path, capsys) -> None:
    """Printed and read back it is the same run, what the user sets wins, and what follows from it follows."""
    pretrained_folder(place / "tiny")
    (place / "data.jsonl").write_text(lines(CONVERSATIONS))
    before = sorted(path.name for path in place.iterdir())
    words = ["finetune", "tiny", "data.jsonl", "--print-config", "--set", "device=cpu"]
    assert main([*words, "--set", "batch.rows=6", "--set", "blocks.count=2", "--set", "optimizer.lr=1e-3"]) == 0
    shown = capsys.readouterr()
    config = RunConfig.from_mapping(tomllib.loads(shown.out))
    assert (config.batch.rows, config.batch.micro_rows, config.blocks.count) == (6, 3, 2)
    assert config.optimizer.lr == 1e-3
    assert "2 blocks, frozen" in shown.err
    assert main([*words, "--epochs", "30", "--method", "full"]) == 0
    whole = RunConfig.from_mapping(tomllib.loads(capsys.readouterr().out))
    assert whole.blocks.count == 1
    assert whole.schedule.visit == whole.stop.duration
    assert main([*words, "--set", "optimizer.in_backward=true", "--set", "optimizer.name=SGD"]) == 0
    assert {path.name for path in place.iterdir()} - set(before) <= {"cache"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "nothing.jsonl"], "no file or folder 'nothing.jsonl'"),
        (["tiny", "empty.jsonl"], "'empty.jsonl' holds no rows to train on"),
        (["tiny", "odd.jsonl"], "is no known kind of data: its fields are a, b"),
        (["tiny", "images.jsonl"], "'images.jsonl' holds [images], and finetune trains on chat, text, labelled"),
        (["tiny", "preferences.jsonl"], "is a preference row (chosen, rejected)"),
        (["folder", "data.jsonl"], "'folder' is no folder with a config.json"),
        (["./nowhere", "data.jsonl"], "'./nowhere' is no folder with a config.json"),
        (["data.jsonl", "data.jsonl"], "'data.jsonl' is no folder with a config.json"),
        (["encoder", "data.jsonl"], "is an encoder, whose tokens see those that they should predict"),
        (["tiny", "data.jsonl", "--memory", "100KB"], "'tiny' does not fit: it takes at least"),
        (["tiny", "data.jsonl", "--memory", "much"], "'much' is not a size of memory"),
        (["tiny", "data.jsonl", "--method", "lora"], "--method lora trains an adapter"),
        (["tiny", "data.jsonl", "--set", "batch.row=2"], "did you mean 'rows'?"),
        (["tiny", "data.jsonl", "--set", "blocks.count=9"], "it cannot be trained in 9 blocks of whole layers"),
        (["tiny", "data.jsonl", "--out", "folder"], "'folder/model' exists already; choose another --out"),
    ],
)
def test_bad_input_is_one_message_before_any_weight_is_loaded(
    words: list[str], message: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(model_loading, "load_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    pretrained_folder(place / "tiny")
    pretrained_folder(place / "encoder", "bert")
    (place / "folder").mkdir()
    (place / "folder" / "model").write_text("mine")
    (place / "data.jsonl").write_text(lines(CONVERSATIONS))
    (place / "empty.jsonl").write_text("")
    (place / "odd.jsonl").write_text(lines([{"a": 1, "b": 2}]))
    (place / "images.jsonl").write_text(lines([{"img": 1, "label": 2}]))
    (place / "preferences.jsonl").write_text(lines([{"prompt": "1?", "chosen": "2", "rejected": "3"}] * 9))
    assert main(["finetune", *words]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("error:") == 1
    assert not (place / "runs").exists()

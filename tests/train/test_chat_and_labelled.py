"""Runs on conversations and on labelled texts: what the model sees, what it costs, what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from blocktrain.cli.main import main
from blocktrain.errors import ConfigError
from blocktrain.records.log import read_events
from blocktrain.train.config import RunConfig
from blocktrain.train.context import build
from blocktrain.train.run import run
from blocktrain.train.toml_dataclasses import override

PAIRS = [("Who?", "A model of a few numbers."), ("1 + 1?", "2"), ("1 + 2?", "3"), ("2 + 2?", "4"), ("2 + 3?", "5")]
LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BERT = LLAMA | {"max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

Make = Callable[..., RunConfig]


@pytest.fixture
def chat(tmp_path: Path) -> Make:
    """A run on five short conversations, with overrides as on the command line."""
    (tmp_path / "data").mkdir()
    for name in ("train", "validation"):
        lines = [json.dumps({"question": question, "answer": f"#### {answer}"}) for question, answer in PAIRS]
        (tmp_path / "data" / f"{name}.jsonl").write_text("\n".join(lines))
    mapping: dict[str, Any] = {
        "device": "cpu",
        "chat": {"source": str(tmp_path / "data"), "row_tokens": 64, "cache": str(tmp_path / "cache")},
        "model": {"architecture": "llama", "config": LLAMA | {"max_position_embeddings": 64}},
        "schedule": {"visit": "2 steps", "sweeps": 1},
        "blocks": {"count": 2},
        "batch": {"rows": 3},
        "optimizer": {"lr": 0.01, "state": "host"},
        "evaluation": {"every": "1000 steps"},
    }

    def make(*overrides: str) -> RunConfig:
        return RunConfig.from_mapping(override(json.loads(json.dumps(mapping)), overrides))

    return make


def losses(config: RunConfig, out: Path) -> list[float]:
    return [event["loss"] for event in read_events(run(config, out).events) if event["kind"] == "step"]


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_micro_batches_weigh_by_learned_tokens(chat: Make, tmp_path: Path, layout: str):
    """transformers#34191: averaging the means of unequal micro-batches gave short answers too much weight."""
    settings = [f"chat.layout={layout}", "optimizer.name=SGD", "prefix.store=off"]
    context = build(chat(*settings), tmp_path)
    rows = range(3)
    assert len(set(context.data.train.weights(rows).tolist())) > 1
    single = [context.model(**context.data.train.batch([row])).loss.item() for row in rows]
    mean = sum(single) / 3
    assert (
        abs(mean - context.model(**context.data.train.batch(rows)).loss.item()) > 1e-4
    )  # the plain mean is another figure
    once = losses(chat(*settings), tmp_path / "whole")
    apart = losses(chat(*settings, "batch.micro_rows=1"), tmp_path / "parts")
    assert apart == pytest.approx(once, rel=1e-6)


def test_a_packed_run_is_the_same_with_the_prefix_cache(chat: Make, tmp_path: Path):
    settings = ["sampling.scope=sweep", "schedule.visit=3 steps", "batch.rows=2"]
    cached = losses(chat(*settings, "prefix.store=host"), tmp_path / "cached")
    assert cached == losses(chat(*settings, "prefix.store=off"), tmp_path / "plain")
    used = [event for event in read_events(tmp_path / "cached" / "events.jsonl") if event["kind"] == "cached"]
    assert sum(event["hits"] for event in used) > 0


def test_a_model_that_mixes_packed_conversations_is_refused(chat: Make, tmp_path: Path):
    bloom = ["model.architecture=bloom", "model.config={hidden_size=32, n_layer=2, n_head=4}"]
    with pytest.raises(ConfigError, match=r"BloomForCausalLM does not keep the conversations.*chat\.layout = 'padded'"):
        build(chat(*bloom), tmp_path)
    build(chat(*bloom, "chat.layout=padded"), tmp_path)


def test_answers_are_written_compared_and_exported(chat: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Five conversations learned by heart: exact match rises from nothing to most of them."""
    folder = run(
        chat(
            "schedule.visit=40 steps",
            "schedule.sweeps=2",
            "evaluation.generate=5",
            "evaluation.new_tokens=32",
            "evaluation.answer_marker='####'",
            "evaluation.batch_rows=2",
            "batch.rows=2",
        ),
        tmp_path / "run",
    )
    events = read_events(folder.events)
    scores = [event["exact_match"] for event in events if event["kind"] == "evaluation"]
    assert scores[0] == 0
    assert scores[-1] >= 0.8
    assert events[-1]["exact_match"] == scores[-1]
    samples = [event for event in events if event["kind"] == "sample"]
    assert [event["prompt"] for event in samples[-5:]] == [f"user:\n{question}\nassistant:\n" for question, _ in PAIRS]
    assert [event["expected"] for event in samples[-5:]] == [f"#### {answer}" for _, answer in PAIRS]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main(["export", str(folder.path), str(tmp_path / "model")]) == 0
    assert "AutoModelForCausalLM.from_pretrained" in capsys.readouterr().out
    about: Any = ModelCard.load(tmp_path / "model" / "README.md")
    assert about.data.pipeline_tag == "text-generation"
    assert "Conversations, with loss on the assistant's turns: `" in about.text
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.use_cache
    question = [{"role": "user", "content": "1 + 1?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**ids, max_new_tokens=32, do_sample=False, pad_token_id=256, eos_token_id=256)
    text = tokenizer.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text == samples[-4]["text"]  # of "1 + 1?"


CLASSIFIERS = {"bert": BERT, "gpt2": GPT2, "llama": LLAMA}


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_classifier_learns_and_is_exported(architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = [("good film", "good"), ("bad film", "bad"), ("good", "good"), ("bad", "bad")] * 4
    text = "text,label\n" + "".join(f"{words},{label}\n" for words, label in words)
    (tmp_path / "data").mkdir()
    for name in ("train", "validation"):
        (tmp_path / "data" / f"{name}.csv").write_text(text)
    config = RunConfig.from_mapping(
        {
            "device": "cpu",
            "labelled": {"source": str(tmp_path / "data"), "row_tokens": 16, "cache": str(tmp_path / "cache")},
            "model": {"architecture": architecture, "config": CLASSIFIERS[architecture]},
            "schedule": {"visit": "10 steps", "sweeps": 2},
            "blocks": {"count": 2},
            "batch": {"rows": 8},
            "optimizer": {"lr": 0.01, "state": "host"},
        }
    )
    folder = run(config, tmp_path / "run")
    events = read_events(folder.events)
    assert events[0]["unit"] == "texts"
    assert events[-1]["accuracy"] == 1

    from transformers import AutoModelForSequenceClassification

    assert main(["export", str(folder.path), str(tmp_path / "model")]) == 0
    assert "AutoModelForSequenceClassification.from_pretrained" in capsys.readouterr().out
    about: Any = ModelCard.load(tmp_path / "model" / "README.md")
    assert about.data.pipeline_tag == "text-classification"
    assert "Texts by `label`: `data` in rows of 16 tokens of `bytes`" in about.text
    assert "nats per text" in about.text
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert model.config.id2label == {0: "bad", 1: "good"}
    context = build(config, tmp_path)
    batch = context.data.validation.batch(range(len(context.data.validation)))
    assert set(batch["labels"].tolist()) == {0, 1}
    with torch.no_grad():
        assert model.eval()(**batch).logits.argmax(-1).tolist() == batch["labels"].tolist()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["text.source=stdlib"], r"give exactly one of the tables"),
        (["sampling.scope=sweep", "sampling.variants=2"], r"sampling\.variants is for augmented images"),
        (["evaluation.generate=-1"], r"generate must not be negative"),
        (["evaluation.new_tokens=0"], r"must be at least 1"),
        (["chat.too_long=shrink"], r"chat\.too_long: 'shrink' is not an allowed value"),
    ],
)
def test_settings_are_checked(chat: Make, overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        chat(*overrides)


def test_only_conversations_can_be_asked(tiny: Make):
    with pytest.raises(ConfigError, match=r"evaluation\.generate works with \[chat\] only"):
        tiny("evaluation.generate=3")


@pytest.mark.parametrize("settings", ["is_decoder=true", "is_decoder=false"])
def test_an_encoder_learns_no_next_tokens(settings: str, chat: Make, tmp_path: Path):
    """Its tokens see the one that they should predict, so its loss fell towards zero and meant nothing."""
    bert = "{hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, "
    config = chat("model.architecture=bert", f"model.config={bert}{settings}}}", "chat.layout=padded")
    if settings == "is_decoder=true":
        build(config, tmp_path)
        return
    with pytest.raises(ConfigError, match=r"'bert' is an encoder, whose tokens see those that they should predict"):
        build(config, tmp_path)


def test_an_architecture_without_the_head_is_refused(chat: Make, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"transformers has no 'vit' that predicts next tokens"):
        build(chat("model.architecture=vit", "model.config={}"), tmp_path)

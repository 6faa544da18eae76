"""The converter of llama2.c checkpoints, against what llama2.c itself writes and how it tokenises."""

from __future__ import annotations

import importlib.util
import itertools
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from blocktrain.records.log import read_events
from blocktrain.train.config import RunConfig
from blocktrain.train.run import run

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "convert_llama2c.py"


@pytest.fixture(scope="module")
def converter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert_llama2c", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(converter: ModuleType, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = shared_data / "checkpoints" / "stories260K", tmp_path_factory.mktemp("stories260K")
    converter.convert(source / "stories260K.bin", source / "tok512.bin", out)
    return out


def test_greedy_text_is_that_of_llama2c(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == 260_032
    written = model.generate(torch.tensor([[1]]), max_new_tokens=66, do_sample=False, pad_token_id=2)
    assert tokenizer.decode(written[0, 1:]).startswith(  # doc/stories260K.md
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw "
        "a big, red ball. She wanted to play with it, but it was too high."
    )


def test_tokens_are_those_of_llama2c(folder: Path, shared_data: Path):
    from transformers import AutoTokenizer

    pieces = read_pieces(shared_data / "checkpoints" / "stories260K" / "tok512.bin")
    text = (shared_data / "tinystories_sample" / "validation_sample.txt").read_text()[:1000] + "\n12 + 7 = 19 # é 中"
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    assert ids == encode(text, pieces)


@pytest.mark.slow
def test_the_gsm8k_example_runs_on_it(folder: Path, shared_data: Path, tmp_path: Path):
    """The example as it is, but for its length."""
    places = {"chat.source": shared_data / "gsm8k", "model.path": folder}
    short = {"chat.max_conversations": 40, "schedule.visit": "4 steps", "schedule.sweeps": 1, "batch.rows": 2}
    asked = {
        "evaluation.rows": 4,
        "evaluation.generate": 2,
        "evaluation.new_tokens": 8,
        "chat.cache": tmp_path / "cache",
    }
    overrides = [f"{key}={value}" for key, value in (places | short | asked).items()]
    config = RunConfig.load(SCRIPT.with_name("gsm8k.toml"), overrides)
    events = read_events(run(config, tmp_path / "run").events)
    scores = [event for event in events if event["kind"] == "evaluation"]
    assert scores[-1]["loss"] < scores[0]["loss"]
    assert [event["expected"].splitlines()[-1] for event in events if event["kind"] == "sample"][:2] == [
        "#### 18",
        "#### 3",
    ]
    assert scores[0]["exact_match"] == 0


def read_pieces(path: Path) -> list[tuple[str, float]]:
    data, at, pieces = path.read_bytes(), 4, []
    while at < len(data):
        score, length = struct.unpack("fi", data[at : at + 8])
        pieces.append((data[at + 8 : at + 8 + length].decode(), score))
        at += 8 + length
    return pieces


def encode(text: str, pieces: list[tuple[str, float]]) -> list[int]:
    """llama2.c's `encode`, plainly: characters, then again and again the pair whose piece has the best score."""
    known = {piece: (number, score) for number, (piece, score) in enumerate(pieces)}
    ids: list[int] = []
    for letter in " " + text:
        ids += [known[letter][0]] if letter in known else [byte + 3 for byte in letter.encode()]
    while True:
        pairs = [(pieces[one][0] + pieces[other][0], at) for at, (one, other) in enumerate(itertools.pairwise(ids))]
        found = [(known[pair][1], -at) for pair, at in pairs if pair in known]
        if not found:
            return ids
        at = -max(found)[1]
        ids[at : at + 2] = [known[pieces[ids[at]][0] + pieces[ids[at + 1]][0]][0]]

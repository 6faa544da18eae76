"""Conversations in rows: masks, positions, packing, and what does not fit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from blocktrain.data.chat import IGNORED, ChatConfig, ChatRows, open_chat
from blocktrain.data.chat_template import DEFAULT
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.errors import ConfigError, DataError, StorageError

PAIRS = [("2 + 2?", "4"), ("Why?", "Because."), ("1 + 1?", "2"), ("Who are you?", "A very small model."), ("Hm", "Ah")]

Write = Callable[..., ChatConfig]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes conversations to a file and returns a configuration for them."""

    def make(pairs: list[tuple[str, str]] = PAIRS, **settings) -> ChatConfig:
        for name in ("train", "validation"):
            lines = [json.dumps({"prompt": question, "completion": answer}) for question, answer in pairs]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        return ChatConfig(source=str(tmp_path), cache=str(tmp_path / "cache"), **{"row_tokens": 96, **settings})

    return make


def text(ids: np.ndarray | torch.Tensor) -> str:
    return ByteTokenizer().decode(int(token) for token in ids if token >= 0)


def test_only_answers_are_labels(write: Write):
    rows = open_chat(write(layout="padded")).train
    batch = rows.batch(range(len(rows)))
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    for row, (question, answer) in enumerate(PAIRS):
        learned = batch["labels"][row] != IGNORED
        assert text(batch["labels"][row]) == answer
        assert torch.equal(batch["labels"][row][learned], batch["input_ids"][row][learned])
        assert learned.sum() == len(answer) + 1 == rows.weights([row])[0]  # the token that ends it is learned too
        length = int(batch["attention_mask"][row].sum())
        assert text(batch["input_ids"][row][:length]) == f"user:\n{question}\nassistant:\n{answer}"


def test_a_row_that_holds_most_conversations(write: Write):
    """Whatever the length of a row is now: those that are dropped for it count."""
    rows = open_chat(write([("?", "a" * length) for length in range(1, 101)], row_tokens=64)).train
    shortest = rows.tokens_that_hold(0.0)
    assert [rows.tokens_that_hold(share) - shortest for share in (0.5, 0.99, 1.0)] == [50, 99, 99]
    assert rows.num_too_long > 0


def test_packed_rows_contain_the_conversations_of_padded_rows(write: Write):
    packed, padded = open_chat(write()).train, open_chat(write(layout="padded")).train
    assert len(packed) < len(padded) == packed.num_conversations == len(PAIRS)
    found = [text(ids) for row in range(len(packed)) for ids in packed.conversations(row)]
    assert sorted(found) == sorted(text(padded.conversations(row)[0]) for row in range(len(padded)))
    batch = packed.batch(range(len(packed)))
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    for row in range(len(packed)):
        lengths = [len(ids) for ids in packed.conversations(row)]
        positions = [*(np.arange(length) for length in lengths), np.arange(96 - sum(lengths))]
        assert batch["position_ids"][row].tolist() == np.concatenate(positions).tolist()
        starts = np.cumsum([0, *lengths])
        assert (batch["labels"][row][starts[starts < 96]] == IGNORED).all()  # else predicted from another conversation
    assert packed.weights(range(len(packed))).sum() == padded.weights(range(len(padded))).sum()
    assert (packed.weights([0])[0], packed.weights([1])[0]) == tuple((batch["labels"][:2] != IGNORED).sum(1).tolist())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_loss_of_packed_rows_is_the_mean_over_their_conversations(name: str, write: Write):
    rows = open_chat(write()).train
    settings = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    kind = {"gpt2": hf.GPT2Config, "llama": hf.LlamaConfig}[name]
    more = {"intermediate_size": 48} if name == "llama" else {}
    config = kind(**settings, **more, use_cache=False, bos_token_id=0, eos_token_id=256, max_position_embeddings=96)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    packed = rows.batch([0])
    loss = model(**packed).loss
    alone = []
    at = 0
    for ids in rows.conversations(0):
        part = {key: packed[key][:, at : at + len(ids)] for key in ("input_ids", "labels")}
        learned = int((part["labels"] != IGNORED).sum())
        alone.append((model(**part).loss, learned))
        at += len(ids)
    assert len(alone) > 1
    weighted: Any = sum(value * count for value, count in alone) / sum(count for _, count in alone)
    torch.testing.assert_close(loss, weighted, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(value, list(model.parameters())) for value in (loss, weighted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    blind = {key: value for key, value in packed.items() if key != "position_ids"}
    assert not torch.allclose(
        model(**blind).loss, loss, rtol=1e-5
    )  # without positions the conversations see each other


def test_what_is_too_long_is_dropped_or_cut_off_with_one_warning(write: Write, caplog: pytest.LogCaptureFixture):
    pairs = [*PAIRS, ("Tell me a story", "Once upon a time " * 9), ("x" * 200, "never reached")]
    with caplog.at_level(logging.WARNING):
        rows = open_chat(write(pairs)).train
    assert (rows.num_conversations, rows.num_too_long) == (5, 2)
    assert "2 of 7 train conversations are longer than 96 tokens and are left out" in caplog.text
    caplog.clear()
    cut = open_chat(write(pairs, too_long="truncate")).train
    assert (cut.num_conversations, cut.num_too_long) == (6, 2)  # of the last one, nothing learned is left
    assert max(len(ids) for row in range(len(cut)) for ids in cut.conversations(row)) == 96
    assert "1 of 7 train conversations have nothing to learn" in caplog.text
    with pytest.raises(DataError, match=r"none of the 5 conversations fits into a row of 8 tokens \(the shortest has"):
        open_chat(write(row_tokens=8))


def test_prompt_and_answer_of_a_conversation(write: Write):
    rows = open_chat(write()).validation
    found = [tuple(text(part) for part in rows.prompt_and_answer(index)) for index in range(rows.num_conversations)]
    assert found == [(f"user:\n{question}\nassistant:\n", answer) for question, answer in PAIRS]


def test_a_damaged_folder_says_what_to_delete(write: Write):
    folder = open_chat(write()).train.folder
    (folder / "trained.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"is not a folder of rendered conversations .* delete it"):
        ChatRows(folder, row_tokens=96, pad=256)


def test_a_single_conversation_needs_others_for_validation(tmp_path: Path):
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    with pytest.raises(DataError, match=r"single row cannot be divided.*name other rows with validation"):
        open_chat(ChatConfig(source=str(tmp_path / "one.jsonl"), cache=str(tmp_path / "cache")))


def test_settings_are_checked():
    bad: list[tuple[dict[str, Any], str]] = [
        ({"row_tokens": 1}, "at least 2 tokens"),
        ({"validation_share": 0.0}, "between 0 and 1"),
        ({"max_conversations": 0}, "at least 1"),
    ]
    for settings, message in bad:
        with pytest.raises(ConfigError, match=message):
            ChatConfig(source="x", **settings)


def test_real_gsm8k(shared_data: Path, tmp_path: Path):
    config = ChatConfig(source=str(shared_data / "gsm8k"), max_conversations=200, row_tokens=1024, cache=str(tmp_path))
    rows = open_chat(config).validation
    assert rows.num_conversations + rows.num_too_long == 200
    prompt, answer = rows.prompt_and_answer(0)
    assert text(prompt).startswith("user:\nJanet’s ducks lay 16 eggs per day.")
    assert text(answer).endswith("#### 18")


def test_no_room_for_the_scratch_files(
    tmp_path: Path, no_file_larger_than: Callable[[int], AbstractContextManager[None]]
):
    """The first file of a build is written by `datasets`; its errors must say that the disk is full, too."""
    rows = [json.dumps({"prompt": "a" * 500, "completion": "b" * 500}) for _ in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    config = ChatConfig(source=str(tmp_path / "rows.jsonl"), row_tokens=2048, cache=str(tmp_path / "cache"))
    with no_file_larger_than(60_000), pytest.raises(StorageError, match="no room left while writing"):
        open_chat(config)
    assert not [path for path in (tmp_path / "cache").glob("chat-*/*") if path.is_dir()]
    folder = open_chat(config).train.folder
    assert {path.name for path in folder.iterdir()} == {"starts.npy", "tokens.bin", "trained.bin"}


def write_rows(folder: Path, rows: list[Any], **settings) -> ChatConfig:
    """Rows to train on, as they are, and two good ones to validate on."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    (data / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (data / "validation.jsonl").write_text("\n".join(json.dumps(GOOD) for _ in range(2)))
    return ChatConfig(source=str(data), cache=str(folder / "cache"), row_tokens=96, **settings)


GOOD = {"prompt": "2 + 2?", "completion": "4"}
NULL = {"prompt": "2 + 2?", "completion": None}


def test_fields_that_are_not_read_are_named_once_for_the_data_set(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Such fields were dropped without a warning. A run that finds the tokens in the cache warns, too."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [{**GOOD, "id": 1}, {**GOOD, "id": 2, "tools": tools}, {**GOOD, "id": None, "note": ""}, GOOD]
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            open_chat(write_rows(tmp_path, rows))
        named = "these fields are not read: 'id' (2 rows), 'tools' (1 rows) of 6 rows; chat.fields says which"
        assert [named in record.getMessage() for record in caplog.records] == [True]


def test_rows_without_other_fields_give_no_warning(write: Write, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        open_chat(write())
    assert caplog.records == []


def test_a_bad_row_is_skipped_and_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """One bad row in a file of any size ended the run."""
    clean = open_chat(write_rows(tmp_path, [GOOD] * 9)).train
    rows = clean
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            rows = open_chat(write_rows(tmp_path, [*[GOOD] * 4, NULL, *[GOOD] * 5])).train
        text = (
            "1 of 10 train conversations cannot be used and are skipped; they: 'train.jsonl#4': field 'completion' is"
        )
        assert [text in record.getMessage() for record in caplog.records] == [True]
    for name in ("input_ids", "labels"):
        assert torch.equal(rows.batch(range(len(rows)))[name], clean.batch(range(len(clean)))[name])


def test_many_bad_rows_are_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with pytest.raises(DataError, match=r"2 of 10 train conversations cannot be used.* the first: 'train.jsonl#3'"):
        open_chat(write_rows(tmp_path, [*[GOOD] * 3, NULL, NULL, *[GOOD] * 5]))
    with pytest.raises(DataError, match=r"1 of 1 train conversations cannot be used"):
        open_chat(write_rows(tmp_path, [NULL]))
    bad = [NULL, {"messages": []}, {"text": "x"}, {"prompt": "a", "completion": 3}]
    with caplog.at_level(logging.WARNING):
        open_chat(write_rows(tmp_path, [*bad, *[GOOD] * 396]))
    shown = caplog.records[0].getMessage()
    assert "4 of 400 train conversations cannot be used and are skipped; the first: 'train.jsonl#0'" in shown
    assert "'train.jsonl#2' is not a conversation" in shown
    assert "#3" not in shown
    with pytest.raises(DataError, match=r"5 of 401 train conversations cannot be used, and at most 1 %"):
        open_chat(write_rows(tmp_path, [*bad, NULL, *[GOOD] * 396]))


def test_a_row_that_the_template_refuses_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    template = tmp_path / "strict.jinja"
    template.write_text("{% if 'x' in messages[0]['content'] %}{{ raise_exception('no x') }}{% endif %}" + DEFAULT)
    with caplog.at_level(logging.WARNING):
        rows = [GOOD, {**GOOD, "prompt": "x"}, GOOD]
        assert open_chat(write_rows(tmp_path, rows, template=str(template))).train.num_conversations == 2
    assert "'train.jsonl#1': the chat template refuses this conversation: no x" in caplog.text


def test_a_line_that_is_no_json_stays_an_error(tmp_path: Path):
    config = write_rows(tmp_path, [GOOD] * 300)
    with (tmp_path / "data" / "train.jsonl").open("a") as file:
        file.write('\n{"prompt": "torn')
    with pytest.raises(DataError, match=r"line 301 is not JSON"):
        open_chat(config)


def test_fields_and_roles_of_the_configuration(tmp_path: Path):
    talk = [{"from": "guest", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
    plain = open_chat(write_rows(tmp_path, [GOOD] * 2)).train
    (tmp_path / "other").mkdir()
    fields, roles = {"conversations": "dialog"}, {"guest": "user"}
    other = write_rows(tmp_path / "other", [{"dialog": talk}] * 2, fields=fields, roles=roles)
    (tmp_path / "other" / "data" / "validation.jsonl").write_text(json.dumps({"dialog": talk}) + "\n")
    rows = open_chat(other).train
    assert torch.equal(rows.batch([0])["labels"], plain.batch([0])["labels"])
    with pytest.raises(DataError, match=r"chat.fields names 'sytem', but none of the 4 conversations has it"):
        open_chat(write_rows(tmp_path, [GOOD] * 2, fields={"system": "sytem"}))
    some = write_rows(tmp_path, [GOOD, {**GOOD, "persona": "Short."}], fields={"system": "persona"})
    assert open_chat(some).train.num_conversations == 2  # no validation row has it
    with pytest.raises(ConfigError, match=r"fields has the unknown key 'dialog'"):
        ChatConfig(source="x", fields={"dialog": "messages"})

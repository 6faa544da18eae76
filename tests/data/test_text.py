"""From a configuration to rows: which documents go where, and when the cache is rebuilt."""

from __future__ import annotations

import json
import os

import pytest

from blocktrain.data.text import TextConfig, open_text
from blocktrain.errors import ConfigError, DataError, StorageError


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


def _names(rows):
    return {span.document for index in range(len(rows)) for span in rows.documents(index)}


def _text(data, rows):
    return data.tokenizer.decode(rows.batch(range(len(rows)))["input_ids"].flatten().tolist())


def _jsonl(path, count, word="row"):
    path.write_text("".join(json.dumps({"text": f"{word} {i:04d}"}) + "\n" for i in range(count)))
    return str(path)


def test_standard_library_is_the_default(cache):
    data = open_text(TextConfig(cache=cache))
    assert not _names(data.train) & _names(data.validation)
    assert len(data.train) > 40_000
    assert len(data.validation) > 3_000
    assert data.tokenizer is not None
    assert data.tokenizer.name == "bytes"
    first = data.train.documents(0)[0]
    assert (first.document, first.offset) == ("abc.py", 0)
    assert data.tokenizer.decode(data.train.batch([0])["input_ids"][0].tolist()).startswith("# Copyright 2007 Google")


def test_a_folders_own_validation_split_is_used_and_its_test_split_is_not(cache, shared_data):
    data = open_text(TextConfig(source=str(shared_data / "wikitext-2"), row_tokens=1024, cache=cache))
    assert (_names(data.train), _names(data.validation)) == ({"train.txt"}, {"valid.txt"})


def test_a_test_split_is_used_where_there_is_no_validation_split(cache, shared_data):
    config = TextConfig(source=str(shared_data / "gsm8k"), text_field="question", max_documents=50, cache=cache)
    data = open_text(config)
    assert {name.partition("#")[0] for name in _names(data.validation)} == {"test.jsonl"}
    assert data.train.meta.documents == data.validation.meta.documents == 50


def test_books_with_a_gpt2_tokenizer(cache, shared_data):
    config = TextConfig(
        source=str(shared_data / "books"),
        tokenizer=str(shared_data / "gpt2_tokenizer"),
        max_documents=2,
        row_tokens=1024,
        cache=cache,
    )
    data = open_text(config)
    assert _names(data.train) == {"train-00000-of-00003.parquet#0", "train-00000-of-00003.parquet#1"}
    assert 3.5 < data.train.bytes_per_token < 5
    assert _text(data, data.train).count("<|endoftext|>") == 1  # the second one is in the unused rest


def test_a_single_file_is_cut(cache, shared_data):
    source = shared_data / "tinyshakespeare" / "input.txt"
    data = open_text(TextConfig(source=str(source), validation_share=0.1, row_tokens=64, cache=cache))
    text = source.read_text()
    cut = len(text) * 9 // 10 + 1
    assert _names(data.train) == {f"input.txt[:{cut}]"}
    assert _text(data, data.train) == text[: len(data.train) * 64]
    assert _text(data, data.validation) == text[cut:][: len(data.validation) * 64]


def test_rows_of_one_file_are_held_out_by_id(cache, tmp_path):
    config = TextConfig(source=_jsonl(tmp_path / "rows.jsonl", 300), row_tokens=4, validation_share=0.1, cache=cache)
    data = open_text(config)
    assert not _names(data.train) & _names(data.validation)
    assert data.train.meta.documents + data.validation.meta.documents == 300
    assert 15 < data.validation.meta.documents < 50


def test_another_source_for_validation(cache, tmp_path):
    train, other = _jsonl(tmp_path / "a.jsonl", 20), _jsonl(tmp_path / "b.jsonl", 10, word="other")
    data = open_text(TextConfig(source=train, validation=other, row_tokens=8, cache=cache))
    assert data.train.meta.documents == 20
    assert "other 0000" in _text(data, data.validation)
    assert "other" not in _text(data, data.train)


def test_overlapping_sources(cache, tmp_path):
    source = _jsonl(tmp_path / "a.jsonl", 20)
    with pytest.raises(DataError, match=r"a.jsonl' would be in both source .*; leave validation out to hold out"):
        open_text(TextConfig(source=str(tmp_path), validation=source, cache=cache))


def test_tokenized_once_and_again_when_a_file_changes(cache, tmp_path):
    source = tmp_path / "rows.jsonl"
    config = TextConfig(source=_jsonl(source, 50), row_tokens=4, cache=cache)
    first = open_text(config)
    made = (first.train.folder / "tokens.bin").stat().st_mtime_ns
    again = open_text(config)
    assert again.train.folder == first.train.folder
    assert (again.train.folder / "tokens.bin").stat().st_mtime_ns == made
    before = source.stat()
    source.write_text(source.read_text().replace("row", "new"))  # the size of the file does not change
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    changed = open_text(config)
    assert "new" in _text(changed, changed.train)
    assert not first.train.folder.exists()
    assert "row" in _text(first, first.train)  # a process that has mapped the tokens keeps them


def test_row_length_needs_no_new_tokens(cache, tmp_path):
    source = _jsonl(tmp_path / "rows.jsonl", 50)
    folders = {open_text(TextConfig(source=source, row_tokens=n, cache=cache)).train.folder for n in (2, 4, 8)}
    assert len(folders) == 1
    others = [{"validation_share": 0.5}, {"max_documents": 30}]
    assert all(
        open_text(TextConfig(source=source, row_tokens=4, cache=cache, **o)).train.folder not in folders for o in others
    )


def test_no_room_for_the_tokens(cache, tmp_path, no_file_larger_than):
    (tmp_path / "big.txt").write_text("x" * 100_000)
    config = TextConfig(source=str(tmp_path / "big.txt"), cache=cache)
    with no_file_larger_than(50_000), pytest.raises(StorageError, match="no room left while writing"):
        open_text(config)
    assert len(open_text(config).train) > 0  # nothing of the failed build is in the way


def test_no_room_for_the_names_of_the_documents(cache, tmp_path, no_file_larger_than):
    """These are written by Arrow into another file than the tokens; the error must not differ."""
    source = _jsonl(tmp_path / ("long" * 50 + ".jsonl"), 500, word="")
    with no_file_larger_than(40_000), pytest.raises(StorageError, match="no room left while writing"):
        open_text(TextConfig(source=source, cache=cache))


def test_wrong_values():
    with pytest.raises(ConfigError, match=r"validation_share is 1\.0; it must be between 0 and 1"):
        TextConfig(validation_share=1.0)
    with pytest.raises(ConfigError, match="row_tokens is 1; a row needs at least 2"):
        TextConfig(row_tokens=1)
    with pytest.raises(ConfigError, match="max_documents is 0; it must be at least 1"):
        TextConfig(max_documents=0)


def test_empty_data(cache, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty.txt' holds no text to train on"):
        open_text(TextConfig(source=str(tmp_path / "empty.txt"), cache=cache))
    with pytest.raises(DataError, match=r"empty.txt' holds no text for validation"):
        open_text(
            TextConfig(source=_jsonl(tmp_path / "a.jsonl", 9), validation=str(tmp_path / "empty.txt"), cache=cache)
        )


def test_validation_data_alone(cache, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    _jsonl(folder / "valid.jsonl", 9)
    with pytest.raises(DataError, match=r"has no training data, only validation data"):
        open_text(TextConfig(source=str(folder), cache=cache))


def test_a_row_longer_than_all_data(cache, tmp_path):
    with pytest.raises(
        DataError, match=r"do not fill one row of 100000 tokens; give more text or a smaller row_tokens"
    ):
        open_text(TextConfig(source=_jsonl(tmp_path / "a.jsonl", 9), row_tokens=100_000, cache=cache))


def test_a_row_without_a_text_is_skipped_and_shown(cache, tmp_path, caplog):
    """One such row ended the run."""
    source = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"row {i:04d}"}) for i in range(300)]
    source.write_text("\n".join([*lines, '{"text": null}', '{"txt": "x"}']))
    config = TextConfig(source=str(source), validation=_jsonl(tmp_path / "v.jsonl", 9), row_tokens=4, cache=cache)
    for _ in ("tokenized now", "found in the cache"):
        caplog.clear()
        data = open_text(config)
        assert data.train.meta.documents == 300
        assert "2 of 302 train documents cannot be used and are skipped; they:" in caplog.text
        assert "line 301: field 'text' is null, not text; " in caplog.text
        assert "line 302 has no field 'text'; did you mean 'txt'? (text_field)" in caplog.text
    source.write_text("\n".join([*lines, *['{"text": 3}'] * 4]))
    with pytest.raises(DataError, match=r"4 of 304 train documents cannot be used, and at most 1 % .* is a number"):
        open_text(config)

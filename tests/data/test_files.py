"""Which files a source has, and which split each belongs to."""

from __future__ import annotations

import logging
from pathlib import Path, PurePath

import pytest

from blocktrain.data.files import find_files, split_of
from blocktrain.errors import DataError


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00003.parquet", "train"),
        ("train-00000-of-00001-a1b2c3test.parquet", "train"),
        ("data/validation-00000-of-00001.parquet", "validation"),
        ("TinyStoriesV2-GPT4-valid.txt", "validation"),
        ("wiki.test.tokens", "test"),
        ("dev.jsonl", "validation"),
        ("default/train/0000.parquet", "train"),
        ("test/data-00000-of-00001.arrow", "test"),
        ("latest.txt", None),  # "test" inside a word
        ("trainer.jsonl", None),
        ("tests/test_order.py", None),  # source code names no split
    ],
)
def test_split_is_read_from_the_name(name, split):
    assert split_of(PurePath(name)) == split


def _touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_a_folder_without_names_is_all_training_data_sorted_and_without_hidden_files(tmp_path):
    _touch(tmp_path, "b.txt", "a/c.py", ".git/x.txt", "a/.hidden.txt", "a/__pycache__/c.py", "z.bin")
    files = find_files(tmp_path, {".txt", ".py"})
    assert [file.id for file in files["train"]] == ["a/c.py", "b.txt"]
    assert list(files) == ["train"]


def test_a_readme_next_to_named_splits_is_left_out_with_a_warning(tmp_path, caplog):
    _touch(tmp_path, "README.md", "train.txt", "test.txt")
    with caplog.at_level(logging.WARNING):
        files = find_files(tmp_path, {".txt", ".md"})
    assert {split: [file.id for file in members] for split, members in files.items()} == {
        "train": ["train.txt"],
        "test": ["test.txt"],
    }
    assert "the first is 'README.md'" in caplog.text


def test_a_single_file_is_training_data_whatever_its_name(tmp_path):
    _touch(tmp_path, "test.txt")
    assert [file.id for file in find_files(tmp_path / "test.txt", {".txt"})["train"]] == ["test.txt"]


def test_a_folder_with_nothing_to_read(tmp_path):
    _touch(tmp_path, "model.bin")
    with pytest.raises(DataError, match=r"contains no file to read; known endings: .jsonl, .txt"):
        find_files(tmp_path, {".txt", ".jsonl"})


def test_a_name_that_is_not_utf8_still_has_an_id(tmp_path):
    (tmp_path / "caf\udce9.txt").write_text("latin-1 name")
    assert [file.id for file in find_files(tmp_path, {".txt"})["train"]] == ["caf\\udce9.txt"]

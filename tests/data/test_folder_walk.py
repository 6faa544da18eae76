"""Folders whose links lead to a folder above, to each other, outside or nowhere, and what is not a file."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest

from blocktrain.data.corpus import open_corpus
from blocktrain.data.files import find_files
from blocktrain.data.splits import open_sources
from blocktrain.errors import DataError

SUFFIXES = {".jsonl", ".txt"}


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def names(source: Path) -> dict[str, list[str]]:
    return {split: [file.id for file in files] for split, files in find_files(source, SUFFIXES).items()}


def test_a_link_to_the_parent_folder_adds_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It turned 548 rows into 22,392, the same ones in training and in validation data; two such links never ended."""
    data = touch(tmp_path / "data", "a.jsonl", "more/b.jsonl")
    touch(tmp_path, "of-somebody-else.jsonl")
    for name in ("up", "more/up", "more/up-again"):
        (data / name).symlink_to("..")
    (data / "self").symlink_to(".")
    with caplog.at_level(logging.WARNING):
        assert names(data) == {"train": ["a.jsonl", "more/b.jsonl"]}
    assert [record.getMessage() for record in caplog.records] == [
        f"'{data}/up' leads to a folder that contains it, and is not followed"
    ]


def test_links_between_folders_end(tmp_path: Path):
    """Each of ten folders has links to all others: there are millions of paths, and ten files."""
    for one in range(10):
        touch(tmp_path, f"{one}/{one}.txt")
        for other in range(10):
            (tmp_path / f"{one}" / f"to-{other}").symlink_to(f"../{other}")
    assert names(tmp_path) == {"train": [f"{number}/{number}.txt" for number in range(10)]}


def test_links_to_what_is_outside_are_followed(tmp_path: Path):
    touch(tmp_path / "store", "one/a.txt", "one/deep/b.txt", "c.txt")
    data = touch(tmp_path / "data", "d.txt")
    (data / "linked").symlink_to(tmp_path / "store" / "one")
    (data / "c.txt").symlink_to("../store/c.txt")
    assert names(data) == {"train": ["c.txt", "d.txt", "linked/a.txt", "linked/deep/b.txt"]}


def test_a_file_that_is_reached_twice_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    data = touch(tmp_path, "real/b.txt", "c.txt")
    (data / "a.txt").symlink_to("real/b.txt")
    (data / "again").symlink_to("real")
    os.link(data / "c.txt", data / "d.txt")
    with caplog.at_level(logging.WARNING):
        assert names(data) == {"train": ["c.txt", "real/b.txt"]}
    assert "3 files have another name too and are read once; '" in caplog.text


def test_a_link_may_say_the_split(tmp_path: Path):
    """A file with several names is read by the one that says a split, so a link for each split works."""
    data = touch(tmp_path, "raw/one.txt", "raw/two.txt", "parts/three.txt")
    (data / "train.txt").symlink_to("raw/one.txt")
    (data / "valid.txt").symlink_to("raw/two.txt")
    (data / "test").symlink_to("parts")
    assert names(data) == {"train": ["train.txt"], "test": ["test/three.txt"], "validation": ["valid.txt"]}


def test_one_file_cannot_be_training_and_validation_data(tmp_path: Path):
    data = touch(tmp_path, "train.jsonl")
    (data / "validation.jsonl").symlink_to("train.jsonl")
    with pytest.raises(DataError, match=r"'train.jsonl' and 'validation.jsonl' are one file, which cannot be training"):
        names(data)


def test_source_and_validation_cannot_be_one_file_under_two_names(tmp_path: Path):
    touch(tmp_path, "one.txt")
    os.link(tmp_path / "one.txt", tmp_path / "two.txt")
    with pytest.raises(DataError, match=r"two.txt' would be in both source '.*one.txt' and validation"):
        open_sources(str(tmp_path / "one.txt"), str(tmp_path / "two.txt"), text_field="text", cache=tmp_path / "cache")


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    data = touch(tmp_path / "data", "a.txt")
    (data / "gone").symlink_to("nowhere")
    with caplog.at_level(logging.WARNING):
        assert names(data) == {"train": ["a.txt"]}
    assert "gone' is a link that leads nowhere, and is left out" in caplog.text
    for target in ("nowhere.txt", "b.txt"):  # the second one is a circle
        (data / "b.txt").unlink(missing_ok=True)
        (data / "b.txt").symlink_to(target)
        with pytest.raises(DataError, match=rf"b.txt' is a link to '{target}', which cannot be found; mend the link"):
            names(data)
        with pytest.raises(DataError, match=rf"b.txt' is a link to '{target}', which cannot be found"):
            open_corpus(str(data / "b.txt"), cache=tmp_path / "cache")


def test_what_is_not_a_file_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A FIFO was opened, which waits until somebody writes into it."""
    data = touch(tmp_path, "a.txt")
    os.mkfifo(data / "b.txt")
    os.mkfifo(data / "of-another-kind")
    (data / "c.txt").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as listener, caplog.at_level(logging.WARNING):
        here = Path.cwd()
        os.chdir(data)  # the path of a socket has at most 107 characters
        try:
            listener.bind("d.txt")
        finally:
            os.chdir(here)
        assert names(data) == {"train": ["a.txt"]}
    assert [record.getMessage() for record in caplog.records] == [
        f"'{data}/b.txt' is a FIFO, not a file, and is left out",
        f"'{data}/c.txt' is a device, not a file, and is left out",
        f"'{data}/d.txt' is a socket, not a file, and is left out",
    ]


def test_a_source_that_is_not_a_file_is_an_error(tmp_path: Path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"rows.jsonl' is a FIFO, which cannot be read several times; write it into a"):
        open_corpus(str(tmp_path / "rows.jsonl"), cache=tmp_path / "cache")


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was skipped in silence."""
    data = touch(tmp_path, "a.txt", "closed/b.txt")
    scandir = os.scandir

    def refuse(folder: Path):
        if folder.name == "closed":  # root may list everything, whatever the mode
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read folder '.*closed': Permission denied"):
        names(data)

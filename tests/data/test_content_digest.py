"""A file is known by its content; that of a large one is read once."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from blocktrain.data import content_digest as module
from blocktrain.data.content_digest import content_digest


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file counts as large."""
    monkeypatch.setattr(module, "REMEMBERED_FROM", 0)


def test_it_is_the_sha256_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert content_digest(tmp_path / "file", tmp_path / "cache") == hashlib.sha256(b"content").hexdigest()
    assert not (tmp_path / "cache").exists()  # small files are not remembered


@pytest.mark.usefixtures("remembered")
def test_a_large_file_is_read_once_until_it_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache, reads = tmp_path / "file", tmp_path / "cache", []
    read = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *given: reads.append(1) or read(*given))
    file.write_bytes(b"content")
    first = content_digest(file, cache)
    assert content_digest(file, cache) == first
    assert len(reads) == 1
    os.utime(file, (1, 1))
    assert content_digest(file, cache) == first
    assert len(reads) == 2
    file.write_bytes(b"CONTENT")
    assert content_digest(file, cache) != first


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize("content", [b"", b"null", b"{", b"[]", b"\xff", b'{"seen": []}'])
def test_a_damaged_memory_is_ignored(tmp_path: Path, content: bytes) -> None:
    file, cache = tmp_path / "file", tmp_path / "cache"
    file.write_bytes(b"content")
    first = content_digest(file, cache)
    (entry,) = (cache / "digests").iterdir()
    entry.write_bytes(content)
    assert content_digest(file, cache) == first


@pytest.mark.usefixtures("remembered")
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "cache").write_text("a file, not a folder")
    assert content_digest(tmp_path / "file", tmp_path / "cache") == hashlib.sha256(b"content").hexdigest()


def test_a_copy_has_the_digest_of_the_original(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    shutil.copy(tmp_path / "file", tmp_path / "copy")
    assert content_digest(tmp_path / "copy", tmp_path) == content_digest(tmp_path / "file", tmp_path)

"""Compressed files are read as what they contain; damaged ones say so."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pyarrow as pa
import pytest

from blocktrain.data.compression import read_decompressed
from blocktrain.data.corpus import open_corpus
from blocktrain.data.document import Document
from blocktrain.errors import DataError

ROWS = [{"text": f"row {number} é", "n": number} for number in range(5000)]
CONTENT = {
    ".jsonl": "\n".join(json.dumps(row) for row in ROWS),
    ".json": json.dumps(ROWS),
    ".csv": "text,n\n" + "".join(f"{row['text']},{row['n']}\n" for row in ROWS),
    ".tsv": "text\tn\n" + "".join(f"{row['text']}\t{row['n']}\n" for row in ROWS),
    ".txt": "A text\r\nof two lines.",
}


def compress(data: bytes, suffix: str) -> bytes:
    """In two parts, as parallel compressors write them; one after the other they are one file."""
    half = len(data) // 2
    zip_part = gzip.compress if suffix == ".gz" else lambda part: pa.compress(part, codec="zstd", asbytes=True)
    return zip_part(data[:half]) + zip_part(data[half:])


def documents(folder: Path, text_field: str | None) -> list[str]:
    corpus = open_corpus(str(folder), text_field=text_field, cache=folder / "cache")
    return [document.text for document in corpus.documents("train")]


@pytest.mark.parametrize("compression", [".gz", ".zst"])
@pytest.mark.parametrize(
    ("kind", "text_field"),
    [(".jsonl", "text"), (".txt", "text"), (".jsonl", None), (".json", None), (".csv", None), (".tsv", None)],
)
def test_a_compressed_file_is_what_it_contains(tmp_path: Path, kind: str, text_field: str | None, compression: str):
    for folder, suffix in (("plain", ""), ("compressed", compression)):
        (tmp_path / folder).mkdir()
        data = CONTENT[kind].encode()
        (tmp_path / folder / f"train{kind}{suffix}").write_bytes(compress(data, suffix) if suffix else data)
    plain = documents(tmp_path / "plain", text_field)
    assert len(plain) == (1 if kind == ".txt" else len(ROWS))
    assert documents(tmp_path / "compressed", text_field) == plain


def test_the_name_says_the_split_and_rows_have_the_name_of_the_file(tmp_path: Path):
    for name in ("train.jsonl.gz", "books-val.jsonl.zst"):
        (tmp_path / name).write_bytes(compress(b'{"text": "a"}', name[name.rindex(".") :]))
    corpus = open_corpus(str(tmp_path), cache=tmp_path / "cache")
    assert list(corpus.documents("train")) == [Document(id="train.jsonl.gz#0", text="a")]
    assert list(corpus.documents("validation")) == [Document(id="books-val.jsonl.zst#0", text="a")]


def test_a_compressed_file_beside_its_content_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "a.jsonl.gz").write_bytes(compress(b'{"text": "a"}', ".gz"))
    with caplog.at_level(logging.WARNING):
        assert documents(tmp_path, "text") == ["a"]
    assert "a.jsonl.gz' is left out because 'a.jsonl' is beside it" in caplog.text


@pytest.mark.parametrize("compression", [".gz", ".zst"])
@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: b"plain text, for all its name"])
def test_a_damaged_file_is_named(tmp_path: Path, compression: str, damage):
    path = tmp_path / f"rows.jsonl{compression}"
    path.write_bytes(damage(compress(CONTENT[".jsonl"].encode(), compression)))
    with pytest.raises(DataError, match=rf"rows.jsonl{compression}' cannot be decompressed: .*; copy or compress it"):
        documents(path, "text")


def test_a_bad_line_of_a_compressed_file_has_its_number(tmp_path: Path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n{"text": '))
    with pytest.raises(DataError, match=r"rows.jsonl.gz' line 2 is not JSON"):
        documents(path, "text")


def test_a_pyarrow_without_zstd_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Codec:
        @staticmethod
        def is_available(name: str) -> bool:
            return name != "zstd"

    monkeypatch.setattr(pa, "Codec", Codec)
    (tmp_path / "a.txt.zst").write_bytes(compress(b"text", ".zst"))
    with pytest.raises(DataError, match=r"this build of pyarrow has no zstd; decompress the file with `zstd -d`"):
        read_decompressed(tmp_path / "a.txt.zst")

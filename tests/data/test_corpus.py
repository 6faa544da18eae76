"""Documents and their ids from every kind of source, and one clear error for every way to get them wrong."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blocktrain.data.corpus import open_corpus, read_documents
from blocktrain.data.document import Document
from blocktrain.data.hub import HubCorpus
from blocktrain.errors import DataError


def _jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _arrow(path, table, writer):
    with pa.OSFile(str(path), "wb") as file, writer(file, table.schema) as out:
        out.write_table(table, max_chunksize=1)


def test_every_format_in_one_folder(tmp_path):
    table = pa.table({"n": [0, 1, 2], "text": ["zero", "", "two"]})
    (tmp_path / "a.txt").write_bytes("line\r\nümlaut\n".encode())
    (tmp_path / "empty.txt").touch()
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n\n{"text": "y"}\n')
    pq.write_table(table, tmp_path / "c.parquet")
    _arrow(tmp_path / "d.arrow", table, pa.ipc.new_stream)  # as `datasets.save_to_disk` writes
    _arrow(tmp_path / "e.arrow", table, pa.ipc.new_file)
    assert [(document.id, document.text) for document in read_documents(str(tmp_path))] == [
        ("a.txt", "line\r\nümlaut\n"),
        *[("b.jsonl#0", "x"), ("b.jsonl#2", "y")],
        *[("c.parquet#0", "zero"), ("c.parquet#2", "two")],
        *[("d.arrow#0", "zero"), ("d.arrow#2", "two")],
        *[("e.arrow#0", "zero"), ("e.arrow#2", "two")],
    ]


def test_rows_of_parquet_are_numbered_across_row_groups(tmp_path):
    pq.write_table(pa.table({"text": [f"{i}" for i in range(1000)]}), tmp_path / "many.parquet", row_group_size=300)
    documents = list(read_documents(str(tmp_path / "many.parquet")))
    assert documents == [Document(id=f"many.parquet#{i}", text=f"{i}") for i in range(1000)]


def test_real_splits(shared_data):
    wikitext = {split: list(read_documents(str(shared_data / "wikitext-2"), split=split)) for split in _SPLITS}
    words = {
        split: sum(len(line.split()) + 1 for line in text[0].text.splitlines()) for split, text in wikitext.items()
    }
    assert words == {"train": 2_088_628, "validation": 217_646, "test": 245_569}  # as published
    books = read_documents(str(shared_data / "books"), split="validation")
    assert [document.id for document in books] == [f"validation-00000-of-00001.parquet#{row}" for row in range(5)]
    assert sum(1 for _ in read_documents(str(shared_data / "gsm8k"), text_field="question", split="test")) == 1319


_SPLITS = ("train", "validation", "test")


def test_a_split_that_is_not_there(shared_data):
    with pytest.raises(DataError, match="gsm8k' has no validation files, only test, train"):
        read_documents(str(shared_data / "gsm8k"), split="validation")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"txt": "x"}', r"line 2 has no field 'text'; did you mean 'txt'\? \(text_field\)"),
        ('{"text": 3}', r"line 2: field 'text' is a number, not text"),
        ('{"text": null}', r"line 2: field 'text' is null, not text"),
        ('["text"]', r"line 2 is a list; each line must be an object with fields"),
        ('{"text": ', r"line 2 is not JSON: Expecting value"),
    ],
)
def test_a_wrong_line_of_json(tmp_path, line, message):
    (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        list(read_documents(str(tmp_path / "rows.jsonl")))


def test_a_wrong_column(tmp_path):
    pq.write_table(pa.table({"body": ["x"], "year": [1900]}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet' has no column 'text'; known: body, year \(text_field\)"):
        list(read_documents(str(tmp_path / "rows.parquet")))
    with pytest.raises(DataError, match=r"rows.parquet' row 0: field 'year' is a number, not text"):
        list(read_documents(str(tmp_path / "rows.parquet"), text_field="year"))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
@pytest.mark.parametrize("content", [b"", b"this is no table at all"])
def test_a_damaged_table(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"cannot read|'.*{name}' cannot be read as a"):
        list(read_documents(str(tmp_path / name)))


def test_a_truncated_parquet_file(tmp_path, shared_data):
    whole = (shared_data / "books" / "validation-00000-of-00001.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut.parquet' cannot be read as a .parquet table"):
        list(read_documents(str(tmp_path / "cut.parquet")))


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(DataError, match=r"latin.txt' is not UTF-8 \(byte 3\); convert it, or leave it out"):
        list(read_documents(str(tmp_path / "latin.txt")))


@pytest.mark.parametrize("source", ["nowhere.txt", "data/train.jsonl", "/no/such/folder", "a/b/c", "./here/not", ""])
def test_a_source_that_does_not_exist(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=r"no file or folder .* 'owner/name'|contains no file to read|source of the data is empty"
    ):
        read_documents(source)


def test_a_hub_data_set_that_cannot_be_reached(tmp_path, monkeypatch):
    """Offline, whether this machine is or not: without a network its client tries again for half a minute."""
    for package in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{package}.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"'owner/name:config' is not a file or folder \(seen from .*cannot be read as"):
        _ = open_corpus("owner/name:config", cache=tmp_path).splits


def test_hub_data_set(tmp_path, monkeypatch):
    """`datasets` takes a folder for a data set of the hub, so the reader can be tested without a network. It writes
    into the given cache only, not into that of the user and not next to the data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "of-the-user")

    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    _jsonl(folder / "train.jsonl", [{"text": "a", "n": 1}, {"text": "", "n": 2}, {"text": "c", "n": 3}])
    _jsonl(folder / "test.jsonl", [{"text": "t", "n": 4}])
    cache = tmp_path / "cache"
    corpus = HubCorpus("owner/name", text_field="text", cache=cache)
    assert corpus.splits == ("train", "test")
    assert list(corpus.documents("train")) == [Document(id="train#0", text="a"), Document(id="train#2", text="c")]
    with pytest.raises(DataError, match=r"data set 'owner/name' has no field 'txt'; did you mean 'text'\?"):
        list(HubCorpus("owner/name", text_field="txt", cache=cache).documents("train"))
    assert {path.name for path in folder.iterdir()} == {"train.jsonl", "test.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == {"owner", "cache"}
    assert [path.name for path in cache.iterdir()] == ["datasets"]


@pytest.mark.parametrize("splits", [False, True])
def test_a_folder_of_save_to_disk(tmp_path, splits):
    """The notes that it puts beside the rows were read as rows, which ended a run with [chat] or [labelled]."""
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    (DatasetDict({"train": rows, "test": rows}) if splits else rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / ("train" if splits else "") / "cache-1a2b.arrow").write_text("what `map` left")
    for text_field, texts in (("text", ["a", "b"]), (None, ['{"text": "a", "label": 0}', '{"text": "b", "label": 1}'])):
        corpus = open_corpus(str(tmp_path / "saved"), text_field=text_field, cache=tmp_path)
        assert corpus.splits == (("test", "train") if splits else ("train",))
        assert [document.text for document in corpus.documents("train")] == texts

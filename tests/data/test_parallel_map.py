"""Documents mapped in several processes: in order, with the errors of the function and of the documents."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Features, List, Value

from blocktrain.data import parallel_map
from blocktrain.data.document import Document
from blocktrain.data.parallel_map import map_documents
from blocktrain.errors import DataError

FEATURES = Features({"codes": List(Value("uint32")), "process": Value("int64")})


def codes(documents: list[Document]) -> pa.Table:
    for document in documents:
        if document.text == "bad":
            raise DataError(f"'{document.id}' is bad")
    letters = [[ord(letter) for letter in document.text] for document in documents]
    process = pa.array([os.getpid()] * len(documents), pa.int64())
    return pa.table({"codes": pa.array(letters, pa.list_(pa.uint32())), "process": process})


@pytest.mark.parametrize("processes", [1, 2])
def test_results_are_in_the_order_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int):
    monkeypatch.setattr(parallel_map, "DOCUMENTS_PER_PROCESS", 50)
    monkeypatch.setattr(os, "cpu_count", lambda: processes)
    texts = [*(f"text {number}" for number in range(199)), "half a pair: \ud800"]
    documents = (Document(id=f"rows.jsonl#{row}", text=text) for row, text in enumerate(texts))
    tables = map_documents(documents, codes, features=FEATURES, scratch=tmp_path / "scratch", label="x")
    found = [row for table in tables for row in table.to_pylist()]
    assert ["".join(map(chr, row["codes"])) for row in found] == texts
    workers = {row["process"] for row in found}
    assert workers == {os.getpid()} if processes == 1 else len(workers - {os.getpid()}) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"scratch"}


@pytest.mark.parametrize("count", [3, 200])
def test_an_error_of_the_function_keeps_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int):
    monkeypatch.setattr(parallel_map, "DOCUMENTS_PER_PROCESS", 50)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    documents = [Document(id=f"#{row}", text="bad" if row == count - 1 else "good") for row in range(count)]
    with pytest.raises(DataError, match=rf"^'#{count - 1}' is bad$"):
        list(map_documents(documents, codes, features=FEATURES, scratch=tmp_path / "scratch", label="x"))


def test_an_error_of_the_documents_keeps_its_class(tmp_path: Path):
    def documents():
        yield Document(id="#0", text="good")
        raise DataError("line 2 is wrong")

    with pytest.raises(DataError, match=r"^line 2 is wrong$"):
        list(map_documents(documents(), codes, features=FEATURES, scratch=tmp_path / "scratch", label="x"))

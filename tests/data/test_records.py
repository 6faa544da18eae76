"""Parquet and Arrow files: rows, columns, and nothing written next to them."""

from __future__ import annotations

import datetime
import tempfile
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blocktrain.data.records import table_columns, table_rows
from blocktrain.errors import DataError

TABLE = pa.table(
    {
        "n": [0, None, 2],
        "turns": [[{"role": "user", "content": "a"}], [], None],
        "at": [datetime.datetime(2020, 1, day) for day in (1, 2, 3)],
    }
)


@pytest.mark.parametrize("name", ["a.parquet", "b[1]*.parquet", "c.arrow", ".hidden/d.parquet"])
def test_rows_are_those_of_the_file_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    data, scratch = tmp_path / "data", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "of-the-user")
    path = data / name
    path.parent.mkdir(parents=True)
    if path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, TABLE.schema) as out:
            out.write_table(TABLE)
    else:
        pq.write_table(TABLE, path)
    assert table_columns(path) == ["n", "turns", "at"]
    assert list(table_rows(path)) == TABLE.to_pylist()
    assert list(table_rows(path, ["n"], setting="source")) == [{"n": 0}, {"n": None}, {"n": 2}]
    assert list(islice(table_rows(path), 1)) == TABLE.to_pylist()[:1]
    assert [found for found in data.rglob("*") if found.is_file()] == [path]
    assert not list(scratch.iterdir())
    assert not (tmp_path / "of-the-user").exists()


def test_a_table_without_rows(tmp_path: Path):
    pq.write_table(TABLE.slice(0, 0), tmp_path / "empty.parquet")
    assert list(table_rows(tmp_path / "empty.parquet", ["n"])) == []


def test_an_arrow_file_that_was_cut_off(tmp_path: Path):
    path = tmp_path / "torn.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, TABLE.schema) as out:
        out.write_table(TABLE, max_chunksize=1)
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(DataError, match=r"torn.arrow' cannot be read as a .arrow table"):
        list(table_rows(path))

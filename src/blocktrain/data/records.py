"""Reading one file of any known format as documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from blocktrain.data.document import Document
from blocktrain.data.files import SourceFile
from blocktrain.data.tables import TABLE_SUFFIXES, table_batches
from blocktrain.errors import DataError, nearest

# One document per file.
TEXT_SUFFIXES = frozenset(
    {".txt", ".tokens", ".md", ".rst", ".tex", ".html", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu"}
    | {".go", ".java", ".js", ".ts", ".rs", ".sh", ".css", ".toml", ".yaml", ".yml"}
)
DOCUMENT_SUFFIXES = TEXT_SUFFIXES | TABLE_SUFFIXES | {".jsonl"}


def file_documents(file: SourceFile, text_field: str) -> Iterator[Document]:
    """The documents of `file` that are not empty; a file of unknown ending is read as one text."""
    try:
        match file.path.suffix:
            case ".jsonl":
                rows = _json_rows(file.path, text_field)
            case ".parquet" | ".arrow":
                rows = _table_rows(file.path, text_field)
            case _:
                text = decode(file.path.read_bytes(), f"'{file.path}'")
                rows = iter(())
                if text:
                    yield Document(id=file.id, text=text)
        for row, text in rows:
            if text:
                yield Document(id=f"{file.id}#{row}", text=text)
    except OSError as error:
        raise DataError(f"cannot read '{file.path}': {error.strerror or error}") from error


def decode(data: bytes, place: str) -> str:
    """`data` as UTF-8; raises `DataError` naming the first bad byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 (byte {error.start:,}); convert it, or leave it out") from error


def require_text(value: object, field: str, place: str) -> str:
    """`value` if it is text; raises `DataError` for null, numbers, lists."""
    if not isinstance(value, str):
        raise DataError(f"{place}: field '{field}' is {type(value).__name__}, not text")
    return value


def _json_rows(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    with path.open("rb") as lines:
        for row, line in enumerate(lines):
            if not line.strip():
                continue
            place = f"'{path}' line {row + 1}"
            try:
                record = json.loads(decode(line, place))
            except ValueError as error:
                raise DataError(f"{place} is not JSON: {error}") from error
            if not isinstance(record, dict):
                raise DataError(f"{place} is a JSON {type(record).__name__}; each line must be an object with fields")
            if text_field not in record:
                raise DataError(f"{place} has no field '{text_field}'; {nearest(text_field, record)} (text_field)")
            yield row, require_text(record[text_field], text_field, place)


def _table_rows(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    row = 0
    for batch in table_batches(path, [text_field], setting="text_field"):
        for value in batch.column(0):
            yield row, require_text(value.as_py(), text_field, f"'{path}' row {row}")
            row += 1

"""Reading one file of any known format as documents, or as records: rows of named fields."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blocktrain.data.document import Document
from blocktrain.data.files import SourceFile
from blocktrain.data.tables import TABLE_SUFFIXES, table_batches, table_schema
from blocktrain.errors import DataError, nearest

# One document per file.
TEXT_SUFFIXES = frozenset(
    {".txt", ".tokens", ".md", ".rst", ".tex", ".html", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu"}
    | {".go", ".java", ".js", ".ts", ".rs", ".sh", ".css", ".toml", ".yaml", ".yml"}
)
DOCUMENT_SUFFIXES = TEXT_SUFFIXES | TABLE_SUFFIXES | {".jsonl"}
# Rows of named fields.
RECORD_SUFFIXES = TABLE_SUFFIXES | {".jsonl", ".json", ".csv", ".tsv"}


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


def file_records(file: SourceFile) -> Iterator[Document]:
    """The rows of `file` with all their fields, each as a document whose text is a JSON object."""
    try:
        for row, record in _records(file.path):
            yield Document(id=f"{file.id}#{row}", text=json.dumps(record, ensure_ascii=False, default=str))
    except OSError as error:
        raise DataError(f"cannot read '{file.path}': {error.strerror or error}") from error


def record_of(document: Document) -> dict[str, Any]:
    """The fields of a row that `file_records` gave."""
    try:
        return json.loads(document.text)
    except ValueError:  # the one document of a source, cut in two to hold a part of it out
        raise DataError(
            f"'{document.id}': a single row cannot be divided into training and validation data; name other rows with "
            "validation"
        ) from None


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    match path.suffix:
        case ".jsonl":
            yield from _json_records(path)
        case ".json":
            yield from enumerate(_json_list(path))
        case ".csv" | ".tsv":
            yield from enumerate(_separated(path, "," if path.suffix == ".csv" else "\t"))
        case ".parquet" | ".arrow":
            batches = table_batches(path, table_schema(path).names, setting="source")
            yield from enumerate(record for batch in batches for record in batch.to_pylist())
        case _:
            raise DataError(f"'{path}' has no rows of fields; known endings: {', '.join(sorted(RECORD_SUFFIXES))}")


def _json_list(path: Path) -> list[dict[str, Any]]:
    try:
        records = json.loads(decode(path.read_bytes(), f"'{path}'"))
    except ValueError as error:
        raise DataError(f"'{path}' is not JSON: {error}") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise DataError(f"'{path}' must be one JSON list of objects; one object a line belongs into a .jsonl file")
    return records


def _separated(path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    """Rows under a line of names. Tab-separated files have no quoting (GLUE's hold lone quotation marks)."""
    text = io.StringIO(decode(path.read_bytes(), f"'{path}'").removeprefix("\ufeff"), newline="")
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    rows = csv.DictReader(text, delimiter=delimiter, quoting=quoting)
    try:
        for record in rows:
            if None in record or None in record.values():
                raise DataError(
                    f"'{path}' line {rows.line_num} has not the {len(rows.fieldnames or ())} fields named above"
                )
            yield record
    except csv.Error as error:
        raise DataError(f"'{path}' line {rows.line_num}: {error}") from error


def _json_rows(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    for row, record in _json_records(path):
        place = f"'{path}' line {row + 1}"
        if text_field not in record:
            raise DataError(f"{place} has no field '{text_field}'; {nearest(text_field, record)} (text_field)")
        yield row, require_text(record[text_field], text_field, place)


def _json_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
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
            yield row, record


def _table_rows(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    row = 0
    for batch in table_batches(path, [text_field], setting="text_field"):
        for value in batch.column(0):
            yield row, require_text(value.as_py(), text_field, f"'{path}' row {row}")
            row += 1

"""Reading one file of any known format as documents, or as records: rows of named fields.

Parquet and Arrow files are read through `datasets`, a few hundred rows at a time and without a copy on the disk. Text,
JSON and separated values are read here and not by `datasets`, whose readers change their content and do not say which
line of the file is wrong; docs/decisions/0018-datasets-library.md shows how.
"""

from __future__ import annotations

import codecs
import csv
import glob
import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from blocktrain.data.compression import open_decompressed, read_decompressed, uncompressed_name, with_compressed
from blocktrain.data.document import Document
from blocktrain.data.files import SourceFile
from blocktrain.data.row_report import RowError
from blocktrain.errors import DataError, first_line, is_utf8, nearest
from blocktrain.parse import json_kind, parse_json

if TYPE_CHECKING:
    from datasets import IterableDataset


TABLE_SUFFIXES = frozenset({".parquet", ".arrow"})  # Arrow's file format, and the stream format of `save_to_disk`

_ROWS_PER_READ = 256  # a row may be a whole book
_PART_BYTES = 2**22


def table_columns(path: Path) -> list[str]:
    """The names of the columns of `path`; raises `DataError` if it is not a table."""
    with _open(path) as rows:
        return rows.column_names or []


def table_rows(path: Path, columns: Sequence[str] | None = None, *, setting: str = "") -> Iterator[dict[str, Any]]:
    """The rows of `path`, in order, with the given columns or with all of them; images and audio stay undecoded.

    Raises `DataError` if the file is damaged or a column is missing; `setting` is the configuration key that names it.
    """
    if columns is not None:
        known = table_columns(path)
        for column in columns:
            if column not in known:
                raise DataError(f"'{path}' has no column '{column}'; {nearest(column, known)} ({setting})")
    with _open(path, columns) as rows:
        yield from rows


@contextmanager
def _open(path: Path, columns: Sequence[str] | None = None) -> Iterator[IterableDataset]:
    """The rows as `datasets` streams them; it puts a lock file into its cache, so that gets a folder of its own."""
    from datasets import load_dataset  # takes half a second

    # Only the parquet reader can leave columns unread, and its default batch is a whole row group.
    parquet = {"columns": columns and list(columns), "batch_size": _ROWS_PER_READ}
    try:
        with tempfile.TemporaryDirectory(prefix="blocktrain-") as scratch:
            rows = load_dataset(
                path.suffix.removeprefix("."),
                data_files=[glob.escape(str(path.absolute()))],
                split="train",
                streaming=True,
                cache_dir=scratch,
                **(parquet if path.suffix == ".parquet" else {}),
            ).decode(False)
            yield rows if columns is None else rows.select_columns(list(columns))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"'{path}' cannot be read as a {path.suffix} table: {first_line(error)}") from error


# One document per file.
TEXT_SUFFIXES = frozenset(
    {".txt", ".tokens", ".md", ".rst", ".tex", ".html", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu"}
    | {".go", ".java", ".js", ".ts", ".rs", ".sh", ".css", ".toml", ".yaml", ".yml"}
)
DOCUMENT_SUFFIXES = TEXT_SUFFIXES | TABLE_SUFFIXES | with_compressed({".jsonl", ".txt"})
# Rows of named fields.
RECORD_SUFFIXES = TABLE_SUFFIXES | with_compressed({".jsonl", ".json", ".csv", ".tsv"})

Record = dict[str, Any]  # the fields of a row, of any JSON type


def file_documents(file: SourceFile, text_field: str) -> Iterator[Document]:
    """The non-empty documents of `file`, bad ones included; a file with an unknown ending is read as one text, in
    parts."""
    path = file.path
    try:
        match uncompressed_name(path).suffix:
            case ".jsonl":
                rows = ((row, record, f"'{path}' line {row + 1}") for row, record in _json_lines(path))
            case ".parquet" | ".arrow":
                records = enumerate(table_rows(path, [text_field], setting="text_field"))
                rows = ((row, record, f"'{path}' row {row}") for row, record in records)
            case _:
                rows = ()
                parts = _text_parts(path)
                part = next(parts, "")
                for following in parts:
                    yield Document(id=file.id, text=part, last=False)
                    part = following
                if part:
                    yield Document(id=file.id, text=part)
        for row, record, place in rows:
            try:
                if text_field not in record:
                    raise RowError(f"{place} has no field '{text_field}'; {nearest(text_field, record)} (text_field)")
                if text := require_text(record[text_field], text_field, place):
                    yield Document(id=f"{file.id}#{row}", text=text)
            except RowError as error:
                yield Document(id=f"{file.id}#{row}", text="", bad=str(error))
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror or error}") from error


def file_records(file: SourceFile) -> Iterator[Document]:
    """The rows of `file` with all their fields, each as a document whose text is a JSON object."""
    try:
        for row, record in _records(file.path):
            yield Document(id=f"{file.id}#{row}", text=json.dumps(record, ensure_ascii=False, default=str))
    except OSError as error:
        raise DataError(f"cannot read '{file.path}': {error.strerror or error}") from error


def record_of(document: Document) -> Record:
    """The fields of a row that `file_records` returned."""
    try:
        return json.loads(document.text)
    except ValueError:  # the only document of a source, which was cut in two to hold out a part of it
        raise DataError(
            f"'{document.id}': a single row cannot be divided into training and validation data; name other rows with "
            "validation"
        ) from None


def _text_parts(path: Path) -> Iterator[str]:
    """The text of `path`, some megabytes at a time; raises `DataError` naming the first byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    with open_decompressed(path) as file:
        while True:
            data = file.read(_PART_BYTES)
            begin = size - len(decoder.getstate()[0])
            size += len(data)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise _not_utf8(f"'{path}'", begin + error.start) from error
            if text:
                yield text
            if not data:
                return


def decode(data: bytes, place: str) -> str:
    """`data` as UTF-8; raises `DataError` naming the first invalid byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(place, error.start) from error


def _not_utf8(place: str, byte: int) -> DataError:
    return DataError(f"{place} is not UTF-8 (byte {byte:,}); convert it, or leave it out")


def require_text(value: object, field: str, place: str) -> str:
    """`value` if it is text; raises `RowError` for null, numbers and lists."""
    if not isinstance(value, str):
        raise RowError(f"{place}: field '{field}' is {json_kind(value)}, not text")
    if not value.isascii() and not is_utf8(value):
        raise RowError(f"{place}: field '{field}' has half of a surrogate pair, which is no character")
    return value


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    suffix = uncompressed_name(path).suffix
    match suffix:
        case ".jsonl":
            yield from _json_lines(path)
        case ".json":
            records = parse_json(decode(read_decompressed(path), f"'{path}'"), f"'{path}'")
            if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
                raise DataError(
                    f"'{path}' must be one JSON list of objects; one object per line belongs in a .jsonl file"
                )
            yield from enumerate(records)
        case ".csv" | ".tsv":
            yield from enumerate(_separated(path, "," if suffix == ".csv" else "\t"))
        case ".parquet" | ".arrow":
            yield from enumerate(table_rows(path))
        case _:
            raise DataError(f"'{path}' has no rows of fields; known endings: {', '.join(sorted(RECORD_SUFFIXES))}")


def _json_lines(path: Path) -> Iterator[tuple[int, Record]]:
    with open_decompressed(path) as lines:
        for row, line in enumerate(lines):
            if not line.strip():
                continue
            place = f"'{path}' line {row + 1}"
            record = parse_json(decode(line, place), place)
            if not isinstance(record, dict):
                raise DataError(f"{place} is {json_kind(record)}; each line must be an object with fields")
            yield row, record


def _separated(path: Path, delimiter: str) -> Iterator[Record]:
    """Rows below a line of names. Tab-separated files have no quoting (GLUE's contain lone quotation marks)."""
    text = io.StringIO(decode(read_decompressed(path), f"'{path}'").removeprefix("\ufeff"), newline="")
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    rows = csv.DictReader(text, delimiter=delimiter, quoting=quoting)
    try:
        for record in rows:
            if None in record or None in record.values():
                raise DataError(
                    f"'{path}' line {rows.line_num} does not have the {len(rows.fieldnames or ())} fields that the "
                    "first line names"
                )
            yield record
    except csv.Error as error:
        raise DataError(f"'{path}' line {rows.line_num}: {error}") from error

"""Reading columns of parquet and Arrow files, a few hundred rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from blocktrain.errors import DataError, first_line, nearest

TABLE_SUFFIXES = frozenset({".parquet", ".arrow"})  # `.arrow` is what `datasets.save_to_disk` writes

_ROWS_PER_READ = 256  # a row may be a whole book


def table_schema(path: Path) -> pa.Schema:
    """The names and types of the columns of `path`; raises `DataError` if it is no table."""
    with _table_errors(path):
        if path.suffix == ".parquet":
            return pq.read_schema(path)
        with pa.memory_map(str(path)) as file:
            return _arrow_reader(file).schema


def table_batches(path: Path, columns: Sequence[str], *, setting: str) -> Iterator[pa.RecordBatch]:
    """The rows of `columns`, in order; `setting` is what the user would change where a column is missing."""
    names = table_schema(path).names
    for column in columns:
        if column not in names:
            raise DataError(f"'{path}' has no column '{column}'; {nearest(column, names)} ({setting})")
    with _table_errors(path):
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as table:
                yield from table.iter_batches(batch_size=_ROWS_PER_READ, columns=list(columns), use_threads=False)
        else:
            with pa.memory_map(str(path)) as file:
                reader = _arrow_reader(file)
                if isinstance(reader, pa.RecordBatchFileReader):
                    batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
                else:
                    batches = iter(reader)
                for batch in batches:
                    yield batch.select(list(columns))


def _arrow_reader(file: pa.NativeFile) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    """`datasets` writes Arrow's stream format, most others its file format, which begins with a signature."""
    signature = file.read(6)
    file.seek(0)
    return pa.ipc.open_file(file) if signature == b"ARROW1" else pa.ipc.open_stream(file)


@contextmanager
def _table_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"'{path}' cannot be read as a {path.suffix} table: {first_line(error)}") from error

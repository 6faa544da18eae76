"""Reading parquet and Arrow files through `datasets`, a few hundred rows at a time and without a copy on the disk."""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from blocktrain.errors import DataError, first_line, nearest

if TYPE_CHECKING:
    from datasets import IterableDataset

TABLE_SUFFIXES = frozenset({".parquet", ".arrow"})  # Arrow's file format, and the stream format of `save_to_disk`

_ROWS_PER_READ = 256  # a row may be a whole book


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

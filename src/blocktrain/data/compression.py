"""Reading files of text, JSON and separated values that are compressed: `.jsonl.gz`, `.txt.zst` and so on.

They are decompressed as they are read, and never as a whole onto the disk. Zstandard is PyArrow's, since Python has
none before 3.14.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO

import pyarrow as pa

from blocktrain.errors import DataError, first_line

COMPRESSIONS = frozenset({".gz", ".zst"})


def with_compressed(suffixes: Iterable[str]) -> frozenset[str]:
    """`suffixes`, each also followed by that of a compression.

    >>> sorted(with_compressed([".txt"]))
    ['.txt', '.txt.gz', '.txt.zst']
    """
    return frozenset(f"{suffix}{compression}" for suffix in suffixes for compression in ("", *COMPRESSIONS))


def uncompressed_name(path: PurePath) -> PurePath:
    """`path` without the suffix of a compression.

    >>> uncompressed_name(PurePath("a/train.jsonl.gz")).name, uncompressed_name(PurePath("train.txt")).name
    ('train.jsonl', 'train.txt')
    """
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def data_suffix(path: PurePath) -> str:
    """The suffix of `path`, with that of its compression.

    >>> data_suffix(PurePath("v1.0.jsonl.gz")), data_suffix(PurePath("v1.0.txt"))
    ('.jsonl.gz', '.txt')
    """
    return uncompressed_name(path).suffix + (path.suffix if path.suffix in COMPRESSIONS else "")


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of `path`, decompressed where its name says that they are compressed.

    Raises `DataError` where they are not, or end too early; `OSError` where the file cannot be opened.
    """
    with path.open("rb") as file:
        try:
            match path.suffix:
                case ".gz":
                    with gzip.open(file) as stream:
                        yield io.BufferedReader(stream)  # pyright: ignore[reportArgumentType]
                case ".zst":
                    if not pa.Codec.is_available("zstd"):
                        raise DataError(
                            f"'{path}': this build of pyarrow has no zstd; decompress the file with `zstd -d`"
                        )
                    with pa.input_stream(file, compression="zstd") as stream:
                        yield io.BufferedReader(stream)  # pyright: ignore[reportArgumentType]
                case _:
                    yield file
        except (EOFError, zlib.error, gzip.BadGzipFile, pa.ArrowException) as error:
            raise _damaged(path, error) from error
        except OSError as error:
            if path.suffix != ".zst":
                raise
            raise _damaged(path, error) from error  # PyArrow's own class is OSError


def read_decompressed(path: Path) -> bytes:
    """All of what `open_decompressed` opens."""
    with open_decompressed(path) as file:
        return file.read()


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"'{path}' cannot be decompressed: {first_line(error)}; copy or compress it again")

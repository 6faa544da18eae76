"""What the tables of all experiments share: their place in a document, and a mean with its range."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from blocktrain.runtime import result_path

END = "<!-- end -->\n"


def add_write(parser: argparse.ArgumentParser, result: Path) -> None:
    """The option `--write [FILE]`: write the result to `result`, or to FILE, and the README's tables anew."""
    parser.add_argument(
        "--write",
        type=result_path,
        nargs="?",
        const=str(result),
        metavar="FILE",
        help=f"default: {result.name} and the README's tables",
    )


def placed(writer: str, table: str) -> str:
    """A table between its markers; `writer` is the script that makes it."""
    return f"{_begin(writer)}{table}{END}"


def put(document: Path, writer: str, table: str) -> None:
    """Write the table in place of the one between the markers of `writer`."""
    before, begun, rest = document.read_text().partition(_begin(writer))
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise ValueError(f"{document} has no line {END if begun else _begin(writer)!r}")
    document.write_text(before + placed(writer, table) + after)


def _begin(writer: str) -> str:
    return f"<!-- written by {writer} -->\n"


def spread(values: Sequence[float], digits: int) -> str:
    """The mean and, of several, the range."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"

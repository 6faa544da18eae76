"""Writes the page: reads the run folders, renders them, and replaces the file in one move."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from blocktrain.errors import DataError, storage_errors
from blocktrain.report.page import page
from blocktrain.report.run import RunRecord


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the report of one run folder, or the comparison of several, to the HTML file `out`; returns `out`.

    A reader never sees half a page, since it is written under another name and then moved into place. Raises
    `DataError` for a folder without a readable log, and `StorageError` where `out` cannot be written.
    """
    if not folders:
        raise DataError("a report needs the folder of at least one run")
    text = page([RunRecord.load(folder) for folder in folders])
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    with storage_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, out)
        finally:
            part.unlink(missing_ok=True)
    return out

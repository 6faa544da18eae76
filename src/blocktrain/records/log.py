"""The file of a run's log, `events.jsonl`: one JSON object per line, appended as things happen.

Only the trainer writes it; everything that shows a run (report, comparison, model card) reads it. All fields of a
record but the clocks are deterministic, so a run that was interrupted and resumed leaves the same log as one that was
not: each checkpoint stores the length of the log, and resuming cuts off what came after it.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from blocktrain.errors import DataError, storage_errors
from blocktrain.parse import parse_json
from blocktrain.records.codec import Event


class EventLog:
    """Append-only `events.jsonl`."""

    def __init__(self, path: Path, *, length: int | None = None):
        """Open `path` for appending; `length` bytes are kept, the rest (written after the checkpoint) is cut off."""
        self.path = path
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            if length is not None:
                size = os.fstat(self._file.fileno()).st_size
                if size < length:  # truncate would fill it up with zeros
                    self._file.close()
                    raise DataError(
                        f"'{path}' has {size} bytes, but it had {length} when the checkpoint was written: restore the "
                        "file that belongs to this run"
                    )
                self._file.truncate(length)
                self._file.seek(0, os.SEEK_END)

    def append(self, event: Event) -> None:
        """Write one record and hand it to the operating system, so that killing the process loses no record."""
        with storage_errors(self.path):
            self._file.write(json_line(event) + b"\n")
            self._file.flush()

    def length(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def sync(self) -> None:
        """Flush the file to the disk, before a checkpoint refers to its length."""
        with storage_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; appending afterwards is an error. Tries once more to write what did not fit."""
        with storage_errors(self.path):
            self._file.close()


class NoLog:
    """The log of every rank but 0, which writes nothing: rank 0 keeps the run's log."""

    def append(self, event: Event) -> None:
        """Nothing is written."""

    def length(self) -> int:
        """Always 0."""
        return 0

    def sync(self) -> None:
        """Nothing was written."""

    def close(self) -> None:
        """Nothing was open."""


def json_line(event: Event) -> bytes:
    """One line of JSON; numbers that JSON cannot hold (inf, nan) become text, so every reader can parse it."""
    return json.dumps(_finite(event), separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def read_events(path: Path, *, length: int | None = None) -> list[Event]:
    """All complete records of a log, or of its first `length` bytes.

    A torn last line, which a process leaves that is killed while writing, is left out. Raises `DataError` where there
    is no log or another line is not JSON.
    """
    if not path.is_file():
        raise DataError(f"'{path}' does not exist; is '{path.parent}' the folder of a run?")
    events, lines = [], path.read_bytes()[:length].split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            events += [parse_json(line, f"'{path}' line {number}")] if line else []
        except DataError:
            if number < len(lines):  # the last has no newline after it: torn
                raise
    return events

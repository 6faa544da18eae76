"""Standard output and standard error that a run outlives: a closed pipe, a closed terminal or a full disk ends what is
shown, and not the training."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


class LastingStream:
    """A text stream. Once it cannot be written, what is written to it is dropped.

    lost: the error that ended it.
    """

    def __init__(self, stream: TextIO):
        self.lost: OSError | None = None
        self._stream = stream

    def write(self, text: str) -> int:
        """The number of characters, whether they were written or dropped."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        """From now on the stream is the null device, so that no later write fails, not even Python's own at exit."""
        self.lost = error
        with suppress(OSError, ValueError):  # a stream of a test has no file
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


@contextmanager
def lasting_display() -> Iterator[LastingStream]:
    """Inside, standard output and standard error are lasting streams; yields standard output."""
    before = sys.stdout, sys.stderr
    streams = LastingStream(sys.stdout), LastingStream(sys.stderr)
    sys.stdout, sys.stderr = cast(TextIO, streams[0]), cast(TextIO, streams[1])
    try:
        yield streams[0]
    finally:
        for stream in streams:
            stream.flush()
        sys.stdout, sys.stderr = before


def replace_what_cannot_be_encoded() -> None:
    """Show characters that the terminal's encoding lacks as escapes, where Python would raise an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            cast(Any, stream).reconfigure(errors="backslashreplace")

"""Errors that a user can act on: each names the value, where it came from, and the way out.

The command line prints only the message and exits with `exit_code`; `--debug` adds the traceback. An exception that is
not a `BlocktrainError` is a bug of this package and keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Errors of the system when a file cannot grow: the disk is full, a quota or a file size limit is reached.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class BlocktrainError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 2


class ConfigError(BlocktrainError):
    """A configuration key is unknown, of the wrong type, or has an impossible value."""


class PartitionError(BlocktrainError):
    """The model cannot be cut into the requested blocks."""


class DataError(BlocktrainError):
    """Training or validation data are missing, empty, or do not fit the model."""


class CheckpointError(BlocktrainError):
    """A checkpoint is damaged, incomplete, or belongs to another model."""


class StorageError(BlocktrainError):
    """A file could not be written: there is no space, no permission, or no such folder."""


class OutOfMemoryError(BlocktrainError):
    """The run does not fit this machine's memory; another configuration or another machine is needed."""


class StoredWeightError(BlocktrainError):
    """The value of a frozen weight was read or changed where it is stored quantized or on the host."""


class NonFiniteError(BlocktrainError):
    """The loss or a gradient became infinite or not a number."""

    exit_code = 1


class PeerError(BlocktrainError):
    """Another process of the run has ended, hangs, or has different weights than this one."""

    exit_code = 1


class Interrupted(BlocktrainError):  # noqa: N818 - it is an event, not a fault
    """A signal asked the run to stop; a checkpoint was written first."""

    def __init__(self, message: str, *, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number


def first_line(error: Exception) -> str:
    """The first line of another library's error message, with the next if it ends in a colon; or the name of its class
    where the message is empty.

    >>> first_line(OSError("no such file\\nsearched in: ...")), first_line(KeyError())
    ('no such file', 'KeyError')
    """
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    return (f"{first} {more[0].strip()}" if first.endswith(":") and more else first).rstrip(".")


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known name, or else all of them.

    >>> nearest("colour", ["color", "size"])
    "did you mean 'color'?"
    >>> nearest("zzz", ["color", "size"])
    'known: color, size'
    """
    names = sorted(known)
    lowered = {name.lower(): name for name in names}
    like = {name: own for name, own in lowered.items() if name[:1] == word[:1].lower()}  # may be less alike
    close = difflib.get_close_matches(word.lower(), like, n=1) or difflib.get_close_matches(
        word.lower(), lowered, n=1, cutoff=0.7
    )
    return f"did you mean '{lowered[close[0]]}'?" if close else f"known: {', '.join(names)}"


def is_utf8(text: str | Path) -> bool:
    """Whether `text` can be encoded: file names on Linux (any bytes) and JSON may have half of a surrogate pair."""
    return not any("\ud800" <= letter <= "\udfff" for letter in str(text))


@contextmanager
def storage_errors(path: str | Path) -> Iterator[None]:
    """Turns a failed write inside this context into a `StorageError` that names `path` and says what to do.

    Libraries written in Rust (safetensors, tokenizers) raise classes of their own, whose messages end in the number of
    the system's error: "No space left on device (os error 28)".
    """
    try:
        yield
    except BlocktrainError:
        raise
    except Exception as error:
        failed = error
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            failed = OSError(int(number[1]), os.strerror(int(number[1])))
        if isinstance(error, UnicodeEncodeError) and not is_utf8(path):  # of a library that takes no other names
            raise StorageError(f"cannot write '{path}': its name is not UTF-8; choose another name") from error
        if not isinstance(failed, OSError):
            raise
        if failed.errno in NO_ROOM:
            raise StorageError(
                f"no room left while writing '{path}' ({failed.strerror}); free some space or choose another folder"
            ) from error
        raise StorageError(f"cannot write '{path}': {failed.strerror or failed}") from error

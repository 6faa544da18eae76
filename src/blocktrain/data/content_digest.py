"""What a file contains, as a digest.

Data are known by it: a copy on another machine, or a file whose time was changed, is still what a run was trained on.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from pathlib import Path

from blocktrain.errors import StorageError
from blocktrain.outputs import write_output
from blocktrain.units import format_bytes

logger = logging.getLogger(__name__)

REMEMBERED_FROM = 16 * 2**20  # bytes; a smaller file is read again in a few milliseconds


def content_digest(path: Path, cache: Path) -> str:
    """The SHA-256 of the file at `path`.

    That of a large file is remembered in the folder `cache` until the file's size, times or place on the disk change.
    Raises `OSError` where the file cannot be read.
    """
    status = path.stat()
    seen = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    name = hashlib.sha256(str(path.resolve()).encode(errors="surrogateescape")).hexdigest()
    known = cache / "digests" / name[:16]
    if status.st_size >= REMEMBERED_FROM:
        with suppress(OSError, ValueError, KeyError, TypeError):
            entry = json.loads(known.read_text())
            if entry["seen"] == seen:
                return str(entry["sha256"])
        logger.info("reading '%s' (%s) to know it again", path, format_bytes(status.st_size))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if status.st_size >= REMEMBERED_FROM:
        with suppress(StorageError):  # the cache cannot be written: the file is read again next time
            write_output(known, json.dumps({"seen": seen, "sha256": digest}))
    return digest

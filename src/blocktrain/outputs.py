"""Writing a file that a user named: whole or not at all, and without replacing what is no file."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

from blocktrain.errors import StorageError, storage_errors


def write_output(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, creating its folder where there is none.

    A reader never sees half a file, because it is written under another name and then moved into place. A link stays a
    link: the file that it points to is written. A character device such as `/dev/null` or a terminal is written
    through; it would otherwise be replaced by a file.

    Raises `StorageError` if `path` is a folder, a pipe, a socket or a disk, or cannot be written.
    """
    data = text.encode("utf-8", errors="backslashreplace")  # a lone surrogate, from a damaged log or a file name
    with storage_errors(path):
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))  # `realpath` stops at a link that leads to itself
        kind = stat.S_IFMT(target.stat().st_mode) if target.exists() else stat.S_IFREG
        if kind == stat.S_IFCHR:
            with target.open("wb", buffering=0) as device:
                device.write(data)
            return
        if kind != stat.S_IFREG:
            names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
            raise StorageError(f"cannot write '{path}': it is {names.get(kind, 'no regular file')}; name another file")
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # a power cut must not leave the name without its content
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, or a file; nothing happens where there is neither."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

"""Walking a folder of data whose links may lead anywhere: to its parent, to each other, to nothing.

Each real folder is walked once, so a link to a folder above adds no file, and no set of links makes the walk endless.
Nothing is opened: a FIFO would wait for somebody to write into it.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from blocktrain.data.compression import data_suffix
from blocktrain.errors import DataError

logger = logging.getLogger(__name__)

# What `save_to_disk` of `datasets` writes beside its rows, and the intermediate results that it leaves there later.
_NOTES_OF_SAVED = ({"dataset_info.json", "state.json"}, {"dataset_dict.json"})
_RESULTS_OF_SAVED = "cache-*.arrow"

Identity = tuple[int, int]  # device and inode: equal for all names of a file or folder


@dataclass(frozen=True, kw_only=True)
class FolderFile:
    """A name of a regular file.

    path: relative to the folder that was walked. through_link: whether it, or a folder in it, is a symbolic link.
    """

    path: PurePath
    identity: Identity
    through_link: bool


def require_folder(path: Path) -> None:
    """Raise `DataError` if `path` is a link that leads nowhere, or a FIFO, a socket or a device."""
    status = _status(path)
    if status is None:
        raise _dangling(path)
    if not stat.S_ISDIR(status.st_mode):
        raise DataError(f"'{path}' is {_kind(status)}, which cannot be read several times; write it into a file")


def walk_folder(source: Path, suffixes: Collection[str]) -> list[FolderFile]:
    """The files below `source` with one of `suffixes`, except hidden ones, in no particular order.

    A file has an entry for each of its names. A link to a folder that contains it is left out with a warning, and so
    are FIFOs, sockets and devices. Raises `DataError` for a link with such a suffix that leads nowhere, and for a
    folder that cannot be listed.
    """
    found: list[FolderFile] = []
    walked: dict[Identity, PurePath] = {}  # under the name that was walked
    other_names: list[tuple[PurePath, PurePath]] = []  # of a folder, and the one that was walked
    above = {identity_of(folder) for folder in source.resolve().parents}
    real: deque[PurePath] = deque([PurePath()])
    links: deque[PurePath] = deque()
    while real or links:
        # All folders without links in their path come first: they keep their names.
        through_link = not real
        folder = (real or links).popleft()
        identity = identity_of(source / folder)
        if identity in above:
            logger.warning("'%s' leads to a folder that contains it, and is not followed", source / folder)
            continue
        if identity in walked:
            other_names.append((folder, walked[identity]))
            continue
        walked[identity] = folder
        for entry, status in _entries(source / folder, suffixes):
            is_link = through_link or entry.is_symlink()
            if stat.S_ISDIR(status.st_mode):
                (links if is_link else real).append(folder / entry.name)
            else:
                identity = (status.st_dev, status.st_ino)
                found.append(FolderFile(path=folder / entry.name, identity=identity, through_link=is_link))
    return found + [
        FolderFile(path=other / file.path.relative_to(first), identity=file.identity, through_link=True)
        for other, first in other_names
        if not other.is_relative_to(first)  # a link to a folder above it
        for file in found
        if file.path.is_relative_to(first)
    ]


def _entries(folder: Path, suffixes: Collection[str]) -> list[tuple[os.DirEntry[str], os.stat_result]]:
    """The subfolders of `folder` and its regular files with one of `suffixes`, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            visible = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda it: it.name)
    except OSError as error:
        raise DataError(f"cannot read folder '{folder}': {error.strerror or error}") from error
    kept: list[tuple[os.DirEntry[str], os.stat_result]] = []
    names = {entry.name for entry in visible}
    for notes in _NOTES_OF_SAVED:
        if notes <= names:
            visible = [it for it in visible if it.name not in notes and not fnmatchcase(it.name, _RESULTS_OF_SAVED)]
    for entry in visible:
        status, suffix = _status(Path(entry.path)), data_suffix(PurePath(entry.name))
        if status is None:
            if suffix in suffixes:
                raise _dangling(Path(entry.path))
            logger.warning("'%s' is a link that leads nowhere, and is left out", entry.path)
        elif stat.S_ISDIR(status.st_mode):
            kept += [] if entry.name.startswith("__pycache__") else [(entry, status)]
        elif suffix not in suffixes:
            continue
        elif stat.S_ISREG(status.st_mode):
            kept.append((entry, status))
        else:
            logger.warning("'%s' is %s, not a file, and is left out", entry.path, _kind(status))
    return kept


def _status(path: Path) -> os.stat_result | None:
    """What `path` or the target of a link is; None for a link that leads nowhere, or in a circle."""
    try:
        return path.stat()
    except OSError as error:
        if path.is_symlink():
            return None
        raise DataError(f"cannot read '{path}': {error.strerror or error}") from error


def identity_of(path: Path) -> Identity:
    """The identity of a file or folder, or of what a link leads to; raises `OSError` where it leads nowhere."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _dangling(path: Path) -> DataError:
    return DataError(f"'{path}' is a link to '{path.readlink()}', which cannot be found; mend the link or remove it")


def _kind(status: os.stat_result) -> str:
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(status.st_mode), "a device")

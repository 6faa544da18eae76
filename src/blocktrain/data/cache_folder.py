"""Folders of derived data: built once, either complete or absent, and rebuilt when their source has changed.

    <home>/text-<hash of key>/<hash of source>.lock                  held by the one process that builds
                             /<hash of state>/                       complete: renamed to this name at the end
                             /<hash of state>.<hash of source>.part/ being built, or left by a killed process

The key says how the data are read (tokenizer, ...), the state is what they contain, and the source is where they are.
The name of a complete folder depends on the first two alone, so a copy of the data elsewhere finds it too; the source
decides what is removed: what was built from it before it changed. Why this is not the cache of `datasets`:
docs/decisions/0018-datasets-library.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blocktrain.errors import storage_errors

logger = logging.getLogger(__name__)


def cache_home(configured: str | None) -> Path:
    """The folder of all caches: the configured one, or else `$XDG_CACHE_HOME/blocktrain`, or `~/.cache/blocktrain`.

    Everything in it can be deleted at any time.
    """
    if configured:
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blocktrain"


def cached_folder(
    home: Path, kind: str, *, source: object, key: object, state: object, write: Callable[[Path], None]
) -> Path:
    """The complete folder for `key` and `state`; `write(folder)` fills it if it does not exist yet.

    source, key, state: JSON values, see the module.

    Other processes that want the folder of the same source wait until it is complete, and a killed process leaves
    nothing that is used. Folders that were built from an earlier state of the source are removed; a process that has
    mapped their files keeps them. Raises `StorageError` when the folder cannot be written, and whatever `write` raises;
    then nothing is left behind.
    """
    place = home / f"{kind}-{digest(key)}"
    folder = place / digest(state)
    if folder.is_dir():
        return folder
    with storage_errors(place):
        place.mkdir(parents=True, exist_ok=True)
    with _locked(place / f"{digest(source)}.lock"):
        if folder.is_dir():  # another process built it while this one waited
            return folder
        for other in place.iterdir():
            if other.name.endswith(f".{digest(source)}.part") or _source_of(other) == source:
                shutil.rmtree(other, ignore_errors=True)
        logger.info("building '%s' for %s", folder, key)
        part = folder.with_suffix(f".{digest(source)}.part")
        try:
            with storage_errors(part):
                part.mkdir()
                (part / "key.json").write_text(json.dumps({"source": source, "key": key}, indent=1))
                write(part)
                for path in part.rglob("*"):  # a power cut must not leave a complete name without its content
                    if path.is_file():
                        with path.open("rb") as file:
                            os.fsync(file.fileno())
                try:
                    part.rename(folder)
                except OSError:
                    if not folder.is_dir():  # if it is one, it was built from a copy of the data in the meantime
                        raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _source_of(folder: Path) -> object:
    """What a complete folder was built from; None for anything else."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads((folder / "key.json").read_text())["source"]
    return None


def digest(value: object) -> str:
    """A short name for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock; the kernel releases it when the process dies, however it dies."""
    with storage_errors(path):
        file = path.open("ab")
    with file:
        with storage_errors(path):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

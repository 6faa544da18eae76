"""Folders of derived data: built once, either complete or absent, and rebuilt when their source has changed.

    <home>/text-<hash of key>/lock                  held by the one process that builds
                             /<hash of state>/      complete: renamed to this name at the end, never changed afterwards
                             /<hash of state>.part/ being built, or left by a killed process; the next build removes it

The key says which data these are (source, tokenizer, ...); the state says what the source looked like. Why this is not
the cache of `datasets`: docs/decisions/0018-datasets-library.md.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def cached_folder(home: Path, kind: str, *, key: object, state: object, write: Callable[[Path], None]) -> Path:
    """The complete folder for `key` and `state`, two JSON values; `write(folder)` fills it if it does not exist yet.

    Other processes that want the same folder wait until it is complete, and a killed process leaves nothing that is
    used. Folders of the same key and another state are removed; a process that has mapped their files keeps them.
    Raises `StorageError` when the folder cannot be written, and whatever `write` raises; then nothing is left behind.
    """
    place = home / f"{kind}-{digest(key)}"
    folder = place / digest(state)
    if folder.is_dir():
        return folder
    with storage_errors(place):
        place.mkdir(parents=True, exist_ok=True)
    with _locked(place / "lock"):
        if folder.is_dir():  # another process built it while this one waited
            return folder
        for stale in place.iterdir():
            if stale.is_dir():
                shutil.rmtree(stale, ignore_errors=True)
        logger.info("building '%s' for %s", folder, key)
        part = folder.with_suffix(".part")
        try:
            with storage_errors(part):
                part.mkdir()
                (part / "key.json").write_text(json.dumps(key, indent=1))
                write(part)
                for path in part.rglob("*"):  # a power cut must not leave a complete name without its content
                    if path.is_file():
                        with path.open("rb") as file:
                            os.fsync(file.fileno())
                part.rename(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return folder


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

"""Finding the files of a source, and from their names the split that each belongs to.

train-00000-of-00003.parquet   TinyStories-train.txt   train/data-00000-of-00001.arrow    -> train
validation.jsonl   valid.txt   dev.parquet   books-val.txt   validation/0000.parquet      -> validation
test.jsonl.gz   test-00000-of-00002.parquet   test/...                                    -> test
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from blocktrain.data.compression import uncompressed_name
from blocktrain.data.content_digest import content_digest
from blocktrain.data.document import Split
from blocktrain.data.folder_walk import FolderFile, Identity, require_folder, walk_folder
from blocktrain.errors import DataError

logger = logging.getLogger(__name__)

_WORDS: Mapping[str, Split] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
_SHARD = re.compile(r"[-_.]\d+-of-\d+.*$")
# Data files; the name of a source file ("test_order.py") says nothing about a split.
_NAMES_A_SPLIT = frozenset({".txt", ".tokens", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow"})


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file and its name inside the source: the relative path, with `/` on every system."""

    id: str
    path: Path


Files = Mapping[Split, tuple[SourceFile, ...]]
FileState = list[str]  # split, name, digest of the content


def split_of(path: PurePath) -> Split | None:
    """The split that the first or last word of the file's name says, else the nearest folder's name; else None.

    >>> split_of(PurePath("data/train-00000-of-00003.parquet")), split_of(PurePath("wiki.valid.tokens"))
    ('train', 'validation')
    >>> split_of(PurePath("test/0000.parquet")), split_of(PurePath("input.txt"))
    ('test', None)
    """
    path = uncompressed_name(path)
    if path.suffix in _NAMES_A_SPLIT:
        words = re.findall(r"[a-z]+", _SHARD.sub("", path.stem).lower())
        for word in words[:1] + words[-1:]:
            if word in _WORDS:
                return _WORDS[word]
        for folder in reversed(path.parent.parts):
            if folder.lower() in _WORDS:
                return _WORDS[folder.lower()]
    return None


def find_files(source: Path, suffixes: Collection[str]) -> Files:
    """The files of `source` by split, sorted by path.

    A single file is training data, whatever its name. A folder is read with its subfolders, except hidden ones. Its
    files whose name says no split are training data too, unless another file is named as training data: then they are
    left out with a warning (a README next to `train.parquet`). Links are followed, and a file with several names is
    read once (`folder_walk.py`). Raises `DataError` when there is nothing to read, a link leads nowhere, or one file is
    training data and also validation or test data.
    """
    if source.is_file():
        return {"train": (SourceFile(id=source.name, path=source),)}
    require_folder(source)
    found: dict[Split | None, list[SourceFile]] = {}
    for relative in _one_name_each(source, walk_folder(source, suffixes)):
        name = relative.as_posix().encode(errors="backslashreplace").decode()  # Linux names may not be UTF-8
        found.setdefault(split_of(relative), []).append(SourceFile(id=name, path=source / relative))
    if not found:
        raise DataError(f"folder '{source}' contains no file to read; known endings: {', '.join(sorted(suffixes))}")
    unnamed = found.pop(None, [])
    if unnamed and "train" in found:
        logger.warning(
            "'%s': %d files whose name says no split are left out, the first is '%s'",
            *(source, len(unnamed), unnamed[0].id),
        )
    elif unnamed:
        found["train"] = unnamed
    return {split: tuple(files) for split, files in found.items() if split is not None}


def _one_name_each(source: Path, files: Collection[FolderFile]) -> list[PurePath]:
    """The path of each file, sorted; of several the one that says a split, else the one without links. A compressed
    file beside the same file uncompressed is left out with a warning."""
    names: dict[Identity, list[FolderFile]] = {}
    paths = {file.path for file in files}
    for file in files:
        if (plain := uncompressed_name(file.path)) != file.path and plain in paths:
            logger.warning("'%s' is left out because '%s' is beside it", source / file.path, plain.name)
            continue
        names.setdefault(file.identity, []).append(file)
    chosen: list[PurePath] = []
    others: list[str] = []
    for members in names.values():
        members.sort(key=lambda file: (split_of(file.path) is None, file.through_link, file.path.as_posix()))
        chosen.append(members[0].path)
        others += [f"'{file.path}' is '{members[0].path}'" for file in members[1:]]
        by_split = {split_of(file.path): file.path for file in members if split_of(file.path)}
        if "train" in by_split and len(by_split) > 1:
            both = " and ".join(f"'{path}'" for path in by_split.values())
            raise DataError(f"'{source}': {both} are one file, which cannot be training data and other data as well")
    if others:
        logger.warning("'%s': %d files have another name too and are read once; %s", source, len(others), others[0])
    return sorted(chosen, key=PurePath.as_posix)


def files_state(files: Files, cache: Path) -> list[FileState]:
    """The names and contents of all files. It does not depend on where the files are.

    cache: the folder where the digests of large files are remembered.
    """
    return [
        [split, file.id, content_digest(file.path, cache)]
        for split, members in sorted(files.items())
        for file in members
    ]

"""From the name of a source to its documents: the standard library, files, folders, or a data set of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blocktrain.data.cache_folder import cache_home
from blocktrain.data.compression import data_suffix
from blocktrain.data.document import Corpus, Document, Split, joined
from blocktrain.data.files import Files, FileState, files_state, find_files
from blocktrain.data.hub import HubCorpus, is_hub_name
from blocktrain.data.records import DOCUMENT_SUFFIXES, RECORD_SUFFIXES, file_documents, file_records
from blocktrain.data.stdlib import stdlib_files, stdlib_name
from blocktrain.errors import DataError


@dataclass(frozen=True, kw_only=True)
class FileCorpus:
    """Documents in files: one per text file, one per row of `.jsonl`, `.parquet` and `.arrow`.

    text_field: the field of a row that is the text; None: all its fields, as JSON.
    cache: the folder where the digests of large files are remembered.
    """

    name: str
    files: Files
    text_field: str | None
    cache: Path

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that have files."""
        return tuple(self.files)

    def documents(self, split: Split) -> Iterator[Document]:
        """The documents of `split`, file by file in the order of their names."""
        for file in self.files[split]:
            yield from file_records(file) if self.text_field is None else file_documents(file, self.text_field)

    def state(self) -> list[FileState]:
        """See `files_state`."""
        return files_state(self.files, self.cache)


def open_corpus(source: str, *, text_field: str | None = "text", cache: Path) -> Corpus:
    """The corpus that `source` names; only file names are read yet.

    source: `"stdlib"`, a file, a folder, or a data set of the Hugging Face hub as `"owner/name"` or
        `"owner/name:configuration"`.
    text_field: the field of a row that holds the text; None reads rows with all their fields, as JSON, from `.jsonl`,
        `.json`, `.csv`, `.tsv` (these also as `.gz` and `.zst`), `.parquet` and `.arrow`.
    cache: the folder that a data set of the hub is downloaded into.

    Raises `DataError` when there is no such source.
    """
    if source == "stdlib" and text_field is not None:
        return FileCorpus(name=stdlib_name(), files=stdlib_files(), text_field=text_field, cache=cache)
    if not source:
        raise DataError("the source of the data is empty; give a file, a folder, 'stdlib', or 'owner/name' of the hub")
    path = Path(source).expanduser()
    suffixes = RECORD_SUFFIXES if text_field is None else DOCUMENT_SUFFIXES
    if path.exists() or path.is_symlink():
        files = find_files(path, suffixes)
        return FileCorpus(name=str(path.resolve()), files=files, text_field=text_field, cache=cache)
    if is_hub_name(source) and data_suffix(path) not in suffixes:
        return HubCorpus(source, text_field=text_field, cache=cache)
    raise DataError(
        f"no file or folder '{source}' (looked in '{Path.cwd()}'); give a path, 'stdlib', or a data set of the "
        "Hugging Face hub as 'owner/name'"
    )


def read_documents(source: str, *, split: Split = "train", text_field: str = "text") -> Iterator[Document]:
    """The non-empty documents of one split of `source` (see `open_corpus`), in a fixed order."""
    corpus = open_corpus(source, text_field=text_field, cache=cache_home(None))
    if split not in corpus.splits:
        raise DataError(f"'{source}' has no {split} files, only {', '.join(corpus.splits)}")
    return joined(corpus.documents(split))

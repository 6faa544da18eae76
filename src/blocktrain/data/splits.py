"""Training and validation documents of one source or two, never the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from blocktrain.data.corpus import FileCorpus, open_corpus
from blocktrain.data.document import Corpus, Document, Split
from blocktrain.data.holdout import hold_out
from blocktrain.errors import DataError


def open_sources(source: str, validation: str | None, *, text_field: str | None) -> list[Corpus]:
    """The corpora to train on and to validate on, one where `validation` is None; raises `DataError` if they overlap.

    text_field: see `open_corpus`.
    """
    names = [source] if validation is None else [source, validation]
    corpora = [open_corpus(name, text_field=text_field) for name in names]
    if len(corpora) == 2:
        _require_disjoint(names, corpora)
    return corpora


def splits(corpora: list[Corpus], *, share: float, limit: int | None) -> tuple[Iterator[Document], Iterator[Document]]:
    """Training and validation documents, `limit` of each at most; `share` of them is held out where no corpus says
    which are for validation. Reading on where there are none raises `DataError`."""
    corpus, other = corpora[0], corpora[-1]
    if "train" not in corpus.splits:
        raise DataError(f"'{corpus.name}' has no training data, only {' and '.join(corpus.splits)} data")
    held_out = _held_out_split(other)
    if held_out is None and other is corpus:
        train, validation = hold_out(lambda: islice(corpus.documents("train"), limit), share)
    else:
        train = islice(corpus.documents("train"), limit)
        validation = islice(other.documents(held_out or "train"), limit)
    return (
        _some(train, f"'{corpus.name}' holds no text to train on"),
        _some(validation, f"'{other.name}' holds no text for validation"),
    )


def _held_out_split(corpus: Corpus) -> Split | None:
    """The test split serves only where there is no validation split: choices made on it would spoil it."""
    for split in ("validation", "test"):
        if split in corpus.splits:
            return split
    return None


def _require_disjoint(names: list[str], corpora: list[Corpus]) -> None:
    """Two sources may be folders that overlap."""
    train, other = corpora
    if isinstance(train, FileCorpus) and isinstance(other, FileCorpus):
        read = {file.path.resolve() for file in train.files.get("train", ())}
        for file in other.files[_held_out_split(other) or "train"]:
            if file.path.resolve() in read:
                raise DataError(
                    f"'{file.path}' would be in both source '{names[0]}' and validation '{names[1]}'; "
                    "leave validation out to hold out a share of the source"
                )
    elif train.name == other.name and _held_out_split(other) is None:
        raise DataError(f"source and validation are both '{train.name}', which has no validation split")


def _some(documents: Iterable[Document], otherwise: str) -> Iterator[Document]:
    """The same documents; raises `DataError` once it turns out that there are none."""
    empty = True
    for document in documents:
        empty = False
        yield document
    if empty:
        raise DataError(otherwise)

"""Training and validation documents of one or two sources; the two sets are disjoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from blocktrain.data.corpus import FileCorpus, open_corpus
from blocktrain.data.document import Corpus, Document, Split
from blocktrain.data.holdout import hold_out
from blocktrain.errors import DataError


def open_sources(source: str, validation: str | None, *, text_field: str | None, cache: Path) -> list[Corpus]:
    """The corpus to train on and the corpus to validate on; a single one where `validation` is None.

    text_field, cache: see `open_corpus`. Raises `DataError` if the two overlap.
    """
    names = [source] if validation is None else [source, validation]
    corpora = [open_corpus(name, text_field=text_field, cache=cache) for name in names]
    if len(corpora) == 2:
        _require_disjoint(names, corpora)
    return corpora


def training_and_validation(
    corpora: list[Corpus], *, share: float, limit: int | None
) -> tuple[Iterator[Document], Iterator[Document]]:
    """Training and validation documents, at most `limit` of each.

    A `share` of the training documents is held out where no corpus has a validation or test split. An iterator that
    finds no document raises `DataError` at its end.
    """
    corpus, other = corpora[0], corpora[-1]
    if "train" not in corpus.splits:
        raise DataError(f"'{corpus.name}' has no training data, only {' and '.join(corpus.splits)} data")
    validation_split = _validation_split(other)
    if validation_split is None and other is corpus:
        train, validation = hold_out(lambda: islice(corpus.documents("train"), limit), share)
    else:
        train = islice(corpus.documents("train"), limit)
        validation = islice(other.documents(validation_split or "train"), limit)
    return (
        _require_any(train, f"'{corpus.name}' holds no text to train on"),
        _require_any(validation, f"'{other.name}' holds no text for validation"),
    )


def describe_validation(validation: str | None, share: float, unit: str) -> str:
    """The end of a model card's sentence about its data."""
    held_out = f"`{validation}`" if validation else f"{share:.1%} of the {unit}"
    return f"validation on {held_out} or the data set's own validation split."


def _validation_split(corpus: Corpus) -> Split | None:
    """The test split is used only where there is no validation split: choices made on it would spoil it."""
    for split in ("validation", "test"):
        if split in corpus.splits:
            return split
    return None


def _require_disjoint(names: list[str], corpora: list[Corpus]) -> None:
    """Raise `DataError` if the two corpora share a file (they may be folders that overlap) or are one data set."""
    train, other = corpora
    if isinstance(train, FileCorpus) and isinstance(other, FileCorpus):
        training_files = {file.path.resolve() for file in train.files.get("train", ())}
        for file in other.files[_validation_split(other) or "train"]:
            if file.path.resolve() in training_files:
                raise DataError(
                    f"'{file.path}' would be in both source '{names[0]}' and validation '{names[1]}'; "
                    "leave validation out to hold out a share of the source"
                )
    elif train.name == other.name and _validation_split(other) is None:
        raise DataError(f"source and validation are both '{train.name}', which has no validation split")


def _require_any(documents: Iterable[Document], otherwise: str) -> Iterator[Document]:
    """Pass `documents` on; raise `DataError` at the end if there were none."""
    empty = True
    for document in documents:
        empty = False
        yield document
    if empty:
        raise DataError(otherwise)

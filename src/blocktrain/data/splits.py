"""Training and validation documents of one or two sources; the two sets are disjoint.

Where a source has no validation split, documents are held out of its training split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from blocktrain.data.corpus import FileCorpus, open_corpus
from blocktrain.data.document import Corpus, Document, Split, hash_fraction
from blocktrain.data.folder_walk import identity_of
from blocktrain.errors import DataError


def hold_out(
    documents: Callable[[], Iterable[Document]], share: float
) -> tuple[Iterator[Document], Iterator[Document]]:
    """Training and validation documents, disjoint; about `share` of them, and at least one, are for validation.

    Whether a document is held out depends on its id alone, so neither the order nor the other documents matter. (The
    exception is a source so small that no id hashes below `share`: then the id with the lowest hash is taken.) A single
    document is cut: the last `share` of its characters become the validation document. `documents()` is read once here
    and once for each of the two iterators; no text is kept in memory.
    """
    held_out: set[str] = set()
    count, length, lowest = 0, 0, (1.0, "")
    for document in documents():
        count += document.last
        length += len(document.text)
        rank = hash_fraction(document.id)
        lowest = min(lowest, (rank, document.id))
        if rank < share:
            held_out.add(document.id)
    if count == 1 and length:
        place = min(length - 1, round(length * (1 - share)))
        return cut(documents(), 0, place, f"[:{place}]"), cut(documents(), place, length, f"[{place}:]")
    held_out = held_out or {lowest[1]}
    return (
        (document for document in documents() if document.id not in held_out),
        (document for document in documents() if document.id in held_out),
    )


def cut(parts: Iterable[Document], begin: int, end: int, name: str) -> Iterator[Document]:
    """Characters `begin` to `end` of a document that comes in parts; `name` is put behind its id.

    >>> list(cut([Document(id="poem.txt", text="roses are red")], 10, 13, "[10:]"))
    [Document(id='poem.txt[10:]', text='red', last=True, bad=None)]
    """
    at = 0
    for part in parts:
        text = part.text[max(begin - at, 0) : max(end - at, 0)]
        at += len(part.text)
        if text or end <= at:
            yield Document(id=part.id + name, text=text, last=end <= at)
        if end <= at:
            return


def first_documents(documents: Iterable[Document], limit: int | None) -> Iterator[Document]:
    """The first `limit` of `documents`, or all."""
    for document in documents:
        yield document
        if limit is not None and (limit := limit - document.last) == 0:
            return


def open_sources(source: str, validation: str | None, *, text_field: str | None, cache: Path) -> list[Corpus]:
    """The corpus to train on and the corpus to validate on; a single one where `validation` is None.

    text_field, cache: see `open_corpus`. Raises `DataError` if the two share a file (they may be folders that overlap)
    or are one data set.
    """
    names = [source] if validation is None else [source, validation]
    corpora = [open_corpus(name, text_field=text_field, cache=cache) for name in names]
    train, other = corpora[0], corpora[-1]
    if validation is None:
        return corpora
    if isinstance(train, FileCorpus) and isinstance(other, FileCorpus):
        training_files = {identity_of(file.path) for file in train.files.get("train", ())}
        for file in other.files[_validation_split(other) or "train"]:
            if identity_of(file.path) in training_files:
                raise DataError(
                    f"'{file.path}' would be in both source '{source}' and validation '{validation}'; "
                    "leave validation out to hold out a share of the source"
                )
    elif train.name == other.name and _validation_split(other) is None:
        raise DataError(f"source and validation are both '{train.name}', which has no validation split")
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
        train, validation = hold_out(lambda: first_documents(corpus.documents("train"), limit), share)
    else:
        train = first_documents(corpus.documents("train"), limit)
        validation = first_documents(other.documents(validation_split or "train"), limit)
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


def _require_any(documents: Iterable[Document], otherwise: str) -> Iterator[Document]:
    """Pass `documents` on; raise `DataError` at the end if there were none."""
    empty = True
    for document in documents:
        empty = False
        yield document
    if empty:
        raise DataError(otherwise)

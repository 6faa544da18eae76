"""A document: a text with an id that is stable from run to run; and a corpus: what documents are read from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from blocktrain.errors import DataError

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text. `id` is its path inside the source, followed by `#row` where a file holds many.

    last: False where the next document of a corpus continues this text: a large file is read in parts.
    bad: why the row has no text that can be used; None: it has.
    """

    id: str
    text: str
    last: bool = True
    bad: str | None = None


class Corpus(Protocol):
    """A source of documents, in a fixed order, in one or more splits."""

    @property
    def name(self) -> str:
        """Identifies the corpus; equal for every spelling of its source."""
        ...

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits it has; never empty."""
        ...

    def documents(self, split: Split) -> Iterator[Document]:
        """The non-empty documents of `split`, in order; raises `DataError` where one cannot be read."""
        ...

    def state(self) -> object:
        """A JSON value that differs once the content of the corpus has changed."""
        ...


def joined(documents: Iterable[Document]) -> Iterator[Document]:
    """`documents`, each as a whole; raises `DataError` for a bad one.

    >>> [whole.text for whole in joined([Document(id="a", text="1", last=False), Document(id="a", text="2")])]
    ['12']
    """
    parts: list[str] = []
    for document in documents:
        if document.bad:
            raise DataError(document.bad)
        parts.append(document.text)
        if document.last:
            yield Document(id=document.id, text="".join(parts))
            parts = []


def hash_fraction(name: str) -> float:
    """A number in [0, 1) that depends on `name` alone, on every machine.

    >>> hash_fraction("json") < 0.05 < hash_fraction("ast")
    True
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64

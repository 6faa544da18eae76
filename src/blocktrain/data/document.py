"""A document: a text under a name that stays the same from run to run, and where corpora get theirs from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text. `id` is its path inside the source, with `#row` behind it where a file holds many."""

    id: str
    text: str


class Corpus(Protocol):
    """Something that holds documents, in a fixed order, under the names of one or more splits."""

    @property
    def name(self) -> str:
        """What the corpus is, the same for every way to spell its source."""
        ...

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits it has; never empty."""
        ...

    def documents(self, split: Split) -> Iterator[Document]:
        """The documents of `split` that have any text, in order; raises `DataError` where one cannot be read."""
        ...

    def state(self) -> Any:
        """A JSON value that differs once what the corpus holds has changed."""
        ...


def fraction(name: str) -> float:
    """A number in [0, 1) that depends on `name` alone: the same on every machine and for every order.

    >>> fraction("json") < 0.05 < fraction("ast")
    True
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64

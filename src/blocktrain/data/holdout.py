"""Holding documents out for validation where a source has no validation split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from blocktrain.data.document import Document, hash_fraction


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
    count, lowest = 0, (1.0, "")
    for document in documents():
        count += 1
        rank = hash_fraction(document.id)
        lowest = min(lowest, (rank, document.id))
        if rank < share:
            held_out.add(document.id)
    if count == 1:
        train, validation = cut(next(iter(documents())), share)
        return iter((train,)), iter((validation,))
    held_out = held_out or {lowest[1]}
    return (
        (document for document in documents() if document.id not in held_out),
        (document for document in documents() if document.id in held_out),
    )


def cut(document: Document, share: float) -> tuple[Document, Document]:
    """The first part of a document and its last `share`; each part's id names its characters.

    >>> cut(Document(id="poem.txt", text="roses are red"), 0.25)
    (Document(id='poem.txt[:10]', text='roses are '), Document(id='poem.txt[10:]', text='red'))
    """
    place = min(len(document.text) - 1, round(len(document.text) * (1 - share)))
    return (
        Document(id=f"{document.id}[:{place}]", text=document.text[:place]),
        Document(id=f"{document.id}[{place}:]", text=document.text[place:]),
    )

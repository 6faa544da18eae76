"""Tokenizing documents once, into one long run of tokens on disk.

tokens.bin        | doc 0 ... eos | doc 1 eos | doc 2 ........ eos |    uint16, or uint32 for a large vocabulary
documents.arrow   the id and the position of the first token of every document
meta.json         counts, and which tokenizer
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from blocktrain.data.document import Document
from blocktrain.data.tokenizer import Tokenizer
from blocktrain.errors import DataError

FORMAT = 1  # part of the key of every token cache: raise it when the layout changes

DOCUMENTS = pa.schema([("id", pa.string()), ("start", pa.int64())])

_BATCH_CHARACTERS = 2**21  # passed to the tokenizer at once, which needs about 100 bytes of memory per token


@dataclass(frozen=True, kw_only=True)
class TokenizedMeta:
    """What a folder of tokens contains.

    tokens: their number, end-of-document tokens included. text_bytes: of the text as UTF-8, without those.
    """

    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    documents: int
    tokens: int
    text_bytes: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The type of one token in `tokens.bin`."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)


def tokenize_documents(documents: Iterable[Document], tokenizer: Tokenizer, folder: Path) -> TokenizedMeta:
    """Tokenize `documents` into the new folder `folder`, a few megabytes at a time.

    A failed write raises `OSError`, which the caller, who knows what the folder is, explains to the user. Raises
    `DataError` for a document that is not valid text.
    """
    folder.mkdir()
    counts = {"documents": 0, "tokens": 0, "text_bytes": 0}
    empty = TokenizedMeta(
        tokenizer=tokenizer.name, tokenizer_fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size, **counts
    )
    with (
        (folder / "tokens.bin").open("wb") as tokens,
        pa.OSFile(os.fsencode(folder / "documents.arrow"), "wb") as file,
        pa.ipc.new_file(file, DOCUMENTS) as table,
    ):
        for batch in _batches(documents):
            for document in batch:
                try:
                    counts["text_bytes"] += len(document.text.encode())
                except UnicodeEncodeError as error:  # JSON can spell "\ud800", which is not a character
                    half = f"half of a surrogate pair at character {error.start}"
                    raise DataError(f"document '{document.id}' has {half}, which is not text") from error
            encoded = [
                np.append(ids, tokenizer.eos).astype(empty.dtype)
                for ids in tokenizer.encode([document.text for document in batch])
            ]
            lengths = [len(ids) for ids in encoded]
            starts = counts["tokens"] + np.cumsum([0, *lengths[:-1]])
            # Not ndarray.tofile, whose error does not say that the disk is full.
            tokens.write(np.concatenate(encoded).data)
            table.write_batch(pa.record_batch([[document.id for document in batch], starts], schema=DOCUMENTS))
            counts["documents"] += len(batch)
            counts["tokens"] += sum(lengths)
    meta = TokenizedMeta(**{**asdict(empty), **counts})
    (folder / "meta.json").write_text(json.dumps(asdict(meta), indent=1))
    return meta


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch

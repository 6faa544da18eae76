"""Tokenizing documents once, into one long run of tokens on disk.

tokens.bin        | doc 0 ... eos | doc 1 eos | doc 2 ........ eos |    uint16, or uint32 for a large vocabulary
documents.arrow   the id and the position of the first token of every document
meta.json         counts, and which tokenizer
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from blocktrain.data.document import Document, joined
from blocktrain.data.pieces import Piece, PieceEncoder
from blocktrain.data.row_report import RowReport
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


def tokenize_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, folder: Path, report: RowReport | None = None
) -> TokenizedMeta:
    """Tokenize `documents` into the new folder `folder`, a few megabytes at a time.

    report: counts the documents, and those that are bad, which are left out. Without it a bad one raises `DataError`.

    A failed write raises `OSError`, which the caller, who knows what the folder is, explains to the user. Raises
    `DataError` for a document that is not valid text.
    """
    folder.mkdir()
    counts = {"documents": 0, "tokens": 0, "text_bytes": 0}
    empty = TokenizedMeta(
        tokenizer=tokenizer.name, tokenizer_fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size, **counts
    )
    encoder = PieceEncoder(tokenizer)
    with (
        _progress() as progress,
        (folder / "tokens.bin").open("wb") as tokens,
        pa.OSFile(os.fsencode(folder / "documents.arrow"), "wb") as file,
        pa.ipc.new_file(file, DOCUMENTS) as table,
    ):
        task = progress.add_task(f"tokenizing {folder.name} text", total=None)
        good = joined(documents) if report is None else _good(documents, report)
        for batch in _batches(encoder.pieces(good)):
            for piece in batch:
                try:
                    counts["text_bytes"] += len(piece.text.encode())
                except UnicodeEncodeError as error:  # JSON can spell "\ud800", which is not a character
                    half = f"half of a surrogate pair at character {piece.offset + error.start}"
                    raise DataError(f"document '{piece.id}' has {half}, which is not text") from error
            encoded = [ids.astype(empty.dtype) for ids in encoder.encode(batch)]
            lengths = [len(ids) for ids in encoded]
            starts = counts["tokens"] + np.cumsum([0, *lengths[:-1]])
            begins = [(piece.id, start) for piece, start in zip(batch, starts, strict=True) if not piece.offset]
            # Not ndarray.tofile, whose error does not say that the disk is full.
            tokens.write(np.concatenate(encoded).data)
            columns = [[name for name, _ in begins], [start for _, start in begins]]
            table.write_batch(pa.record_batch(columns, schema=DOCUMENTS))
            counts["documents"] += len(begins)
            counts["tokens"] += sum(lengths)
            progress.update(task, completed=counts["text_bytes"] / 1e6)
    meta = TokenizedMeta(**{**asdict(empty), **counts})
    (folder / "meta.json").write_text(json.dumps(asdict(meta), indent=1))
    return meta


def _good(documents: Iterable[Document], report: RowReport) -> Iterator[Document]:
    for document in documents:
        if document.bad:
            report.skip(document.bad)
            continue
        if document.last:
            report.add()
        yield document


def _progress() -> Progress:
    """Megabytes so far: how many there will be is not known. Nothing is shown without a terminal."""
    columns = (TextColumn("{task.description}"), TextColumn("{task.completed:,.0f} MB"), TimeElapsedColumn())
    return Progress(SpinnerColumn(), *columns, console=Console(stderr=True), disable=not sys.stderr.isatty())


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch

"""Tokens on disk as rows of equal length, memory-mapped: row i is tokens [i * T, (i + 1) * T) of the whole run.

    documents   | doc 0 ... eos | doc 1 eos | doc 2 ........ eos |
    rows        |    row 0   |    row 1   |    row 2   |    row 3   | rest, not used

A row may contain the end of one document and the beginning of the next; `documents(row)` says which.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from blocktrain.data.tokenize import TokenizedMeta
from blocktrain.errors import DataError
from blocktrain.units import format_count


@dataclass(frozen=True, kw_only=True)
class DocumentSlice:
    """The part of a document that lies in a row: tokens [start, stop) of the row, from token `offset` of `document`."""

    document: str
    offset: int
    start: int
    stop: int


class TokenRows:
    """Rows of `row_tokens` tokens from a folder of tokens. Only the requested rows are read from the disk."""

    def __init__(self, folder: Path, meta: TokenizedMeta, *, row_tokens: int):
        """Map the tokens of `folder` without checking them; `TokenRows.open` checks them."""
        self.folder = folder
        self.meta = meta
        self.row_tokens = row_tokens
        count = meta.tokens // row_tokens
        tokens = np.memmap(folder / "tokens.bin", dtype=meta.dtype, mode="r")
        self._rows = tokens[: count * row_tokens].reshape(count, row_tokens)

    @classmethod
    def open(cls, folder: Path, *, row_tokens: int) -> TokenRows:
        """The rows of a folder that `tokenize_documents` wrote.

        Raises `DataError` if the folder is damaged or has fewer tokens than one row.
        """
        try:
            meta = TokenizedMeta(**json.loads((folder / "meta.json").read_text()))
            size = (folder / "tokens.bin").stat().st_size
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"'{folder}' is not a folder of tokens ({error}); delete it") from error
        if size != meta.tokens * meta.dtype.itemsize:
            expected = meta.tokens * meta.dtype.itemsize
            raise DataError(f"'{folder / 'tokens.bin'}' has {size} bytes, not {expected}; delete '{folder}'")
        if meta.tokens < row_tokens:
            raise DataError(
                f"{meta.documents} documents with {meta.tokens} tokens in total do not fill one row of {row_tokens} "
                f"tokens; give more text or a smaller row_tokens ('{folder}')"
            )
        return cls(folder, meta, row_tokens=row_tokens)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        size = f"{format_count(len(self))} rows of {self.row_tokens} tokens"
        return f"TokenRows({size}, {format_count(self.meta.documents)} documents, tokenizer {self.meta.tokenizer})"

    @property
    def fingerprint(self) -> str:
        """Names these rows; the name of the folder depends on everything that its tokens were made from."""
        return f"{self.folder.parent.parent.name}/{self.folder.parent.name} in rows of {self.row_tokens}"

    @property
    def bytes_per_token(self) -> float:
        """The mean number of text bytes per token; a loss in nats per token divided by it is in nats per byte."""
        return self.meta.text_bytes / self.meta.tokens

    def weights(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """The number of predicted tokens in each row: all but the first, int64 (B,)."""
        return np.full(len(indices), self.row_tokens - 1, np.int64)

    def batch(self, indices: Sequence[int] | np.ndarray, *, variant: int = 0) -> dict[str, torch.Tensor]:
        """Rows `indices` as `input_ids`, int64 (B, T), and as `labels`, the same tensor: the model shifts them.

        Text is not augmented, so `variant` changes nothing.
        """
        del variant
        input_ids = torch.from_numpy(self._rows[np.asarray(indices, np.int64)].astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids}

    def documents(self, index: int) -> list[DocumentSlice]:
        """The documents in row `index`, left to right; the last token of a document is its end-of-document token."""
        begin, end = index * self.row_tokens, (index + 1) * self.row_tokens
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        last = int(np.searchsorted(self._starts, end, side="left"))
        slices = []
        for document in range(first, last):
            start = int(self._starts[document])
            stop = int(self._starts[document + 1]) if document + 1 < len(self._starts) else self.meta.tokens
            slices.append(
                DocumentSlice(
                    document=self._table.column("id")[document].as_py(),
                    offset=max(begin - start, 0),
                    start=max(start - begin, 0),
                    stop=min(stop, end) - begin,
                )
            )
        return slices

    @cached_property
    def _table(self) -> pa.Table:
        """Memory-mapped too: an id takes no memory until it is read."""
        return pa.ipc.open_file(pa.memory_map(os.fsencode(self.folder / "documents.arrow"))).read_all()

    @cached_property
    def _starts(self) -> np.ndarray:
        return self._table.column("start").to_numpy()

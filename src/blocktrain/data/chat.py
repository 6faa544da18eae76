"""Conversations to fine-tune on: rendered by a chat template once, then rows with loss on the assistant's turns only.

    packed     | conversation 3 . . . | conversation 7 | conversation 1 | pad |     several a row, kept apart
    positions    0 1 2 ...              0 1 2 ...        0 1 2 ...        0 1
    padded     | conversation 3 . . . | pad ............................ |          one a row

Packed rows give the model `position_ids` that start again at each conversation. From them `transformers` makes masks
that let no token see another conversation, in the model's own code and so with its sliding windows; a few
architectures ignore them, and `train/build_task.py` finds out by running which.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from blocktrain.data.bin_packing import best_fit
from blocktrain.data.cachefolder import cached_folder, default_home
from blocktrain.data.conversation import messages_of
from blocktrain.data.document import Document
from blocktrain.data.records import record_of
from blocktrain.data.splits import open_sources, splits
from blocktrain.data.template import ChatTemplate
from blocktrain.data.tokenizer import Tokenizer, load_tokenizer
from blocktrain.errors import ConfigError, DataError
from blocktrain.units import format_count

logger = logging.getLogger(__name__)

IGNORED = -100  # a label that takes no part in the loss, as everywhere in transformers

_FORMAT = 1

ChatLayout = Literal["packed", "padded"]
TooLong = Literal["drop", "truncate"]


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Conversations to fine-tune on, with loss on the assistant's turns only.

    source: a file or folder of .jsonl, .json, .csv, .tsv, .parquet or .arrow rows, or "owner/name" on the Hugging Face
        hub; rows of `messages`, `prompt` and `completion`, `question` and `answer`, or Alpaca's.
    validation: another source; none: the source's own validation or test split, else a share of it.
    validation_share: of the conversations, where there is no such split.
    tokenizer: "bytes", a folder, or a model on the Hugging Face hub.
    template: a Jinja file; none: the tokenizer's own template, or a plain one where it has none.
    row_tokens: tokens in a row.
    layout: several conversations in a row, kept apart, or one, filled up.
    too_long: what becomes of a conversation longer than a row; "truncate" cuts its end.
    max_conversations: read only so many of each source.
    cache: a folder for the tokens; none: blocktrain's in the user's cache folder.
    """

    source: str
    validation: str | None = None
    validation_share: float = 0.02
    tokenizer: str = "bytes"
    template: str | None = None
    row_tokens: int = 512
    layout: ChatLayout = "packed"
    too_long: TooLong = "drop"
    max_conversations: int | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.validation_share < 1:
            raise ConfigError(f"validation_share is {self.validation_share}; it must be between 0 and 1, like 0.02")
        if self.row_tokens < 2:
            raise ConfigError(f"row_tokens is {self.row_tokens}; a row needs at least 2 tokens to predict one")
        if self.max_conversations is not None and self.max_conversations < 1:
            raise ConfigError(f"max_conversations is {self.max_conversations}; it must be at least 1, or left out")


@dataclass(frozen=True, kw_only=True)
class ChatData:
    """Rows to train on, rows to validate on (never the same conversations), and the tokenizer that made both."""

    train: ChatRows
    validation: ChatRows
    tokenizer: Tokenizer


def open_chat(config: ChatConfig) -> ChatData:
    """The rows of `config`, rendered and tokenised now if they are not in the cache yet.

    Raises `DataError` when data are missing, of no known shape, or refused by the template; `StorageError` when the
    cache cannot be written.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    template = ChatTemplate(tokenizer, config.template)
    corpora = open_sources(config.source, config.validation, text_field=None)
    key = {
        "format": _FORMAT,
        "corpora": [corpus.name for corpus in corpora],
        "validation_share": config.validation_share,
        "max_conversations": config.max_conversations,
        "template": template.fingerprint,
    }

    def write(folder: Path) -> None:
        sides = splits(corpora, share=config.validation_share, limit=config.max_conversations)
        for name, documents in zip(("train", "validation"), sides, strict=True):
            _encode(documents, template, folder / name)

    home = Path(config.cache).expanduser() if config.cache else default_home()
    folder = cached_folder(home, "chat", key=key, state=[corpus.state() for corpus in corpora], write=write)
    train, validation = (
        ChatRows(
            folder / name,
            row_tokens=config.row_tokens,
            pad=tokenizer.eos,
            layout=config.layout,
            too_long=config.too_long,
        )
        for name in ("train", "validation")
    )
    return ChatData(train=train, validation=validation, tokenizer=tokenizer)


def _encode(documents: Iterable[Document], template: ChatTemplate, folder: Path) -> None:
    """tokens.bin, uint32, and trained.bin, a byte a token: all conversations end to end; starts.npy, int64, where each
    begins, and where the last one ends."""
    folder.mkdir()
    starts = [0]
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "trained.bin").open("wb") as marks:
        for document in documents:
            ids, trained = template.encode(messages_of(record_of(document), document.id), document.id)
            tokens.write(ids.astype(np.uint32).data)
            marks.write(trained.astype(np.uint8).data)
            starts.append(starts[-1] + len(ids))
    np.save(folder / "starts.npy", np.array(starts, np.int64))


class ChatRows:
    """Rows of `row_tokens` tokens over a folder of rendered conversations. Only rows that are asked for are read."""

    def __init__(
        self, folder: Path, *, row_tokens: int, pad: int, layout: ChatLayout = "packed", too_long: TooLong = "drop"
    ):
        """Lay the conversations out; raises `DataError` if the folder is damaged or none of them can be learned from.

        What does not fit is said once, in the log. pad: the token that fills a row up.
        """
        self.folder = folder
        self.row_tokens = row_tokens
        self.layout: ChatLayout = layout
        self.too_long: TooLong = too_long
        self._pad = pad
        try:
            self._starts = np.load(folder / "starts.npy")
            shape = int(self._starts[-1])
            self._tokens = np.memmap(folder / "tokens.bin", np.uint32, "r", shape=shape)
            self._trained = np.memmap(folder / "trained.bin", np.bool_, "r", shape=shape)
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"'{folder}' is not a folder of rendered conversations ({error}); delete it") from error
        lengths = np.diff(self._starts)
        self.num_too_long = int((lengths > row_tokens).sum())
        self._kept = self._learnable(lengths)
        if not len(self._kept):
            raise DataError(
                f"none of the {len(lengths)} conversations fits into a row of {row_tokens} tokens (the shortest has "
                f"{lengths.min()}); raise row_tokens, or set too_long = 'truncate'"
            )
        self._say_what_does_not_fit(len(lengths))
        fitted = np.minimum(lengths[self._kept], row_tokens)
        rows = best_fit(fitted, row_tokens) if layout == "packed" else [[index] for index in range(len(self._kept))]
        self._rows = [self._kept[row] for row in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return (
            f"ChatRows({format_count(len(self))} {self.layout} rows of {self.row_tokens} tokens, "
            f"{format_count(len(self._kept))} conversations)"
        )

    @property
    def fingerprint(self) -> str:
        """Names these rows: the folder is called by what its tokens were made from."""
        place = f"{self.folder.parent.parent.name}/{self.folder.parent.name}"
        return f"{place} {self.layout} in rows of {self.row_tokens}, too long: {self.too_long}"

    @property
    def num_conversations(self) -> int:
        """How many are in the rows."""
        return len(self._kept)

    def weights(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """How many tokens of each row are learned, int64 (B,)."""
        return self._weights[np.asarray(indices, np.int64)]

    def conversations(self, index: int) -> list[np.ndarray]:
        """The tokens of each conversation in row `index`, left to right, int64 (T,)."""
        return [self._tokens[self._span(member)].astype(np.int64) for member in self._rows[index]]

    def batch(self, indices: Sequence[int] | np.ndarray, *, variant: int = 0) -> dict[str, torch.Tensor]:
        """Rows `indices` as `input_ids` and `labels`, int64 (B, T), labels being -100 where nothing is learned; and
        `position_ids`, int64 (B, T), for packed rows, `attention_mask`, int64 (B, T), for padded ones.

        Every `variant` is the same.
        """
        del variant
        shape = (len(indices), self.row_tokens)
        ids, labels = np.full(shape, self._pad, np.int64), np.full(shape, IGNORED, np.int64)
        positions, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            at = 0
            for member in self._rows[index]:
                span = self._span(member)
                end = at + span.stop - span.start
                ids[row, at:end] = self._tokens[span]
                labels[row, at:end] = np.where(self._learned(member), ids[row, at:end], IGNORED)
                positions[row, at:end] = np.arange(end - at)
                mask[row, at:end] = 1
                at = end
            positions[row, at:] = np.arange(self.row_tokens - at)
        kind = {"position_ids": positions} if self.layout == "packed" else {"attention_mask": mask}
        return {name: torch.from_numpy(value) for name, value in {"input_ids": ids, "labels": labels, **kind}.items()}

    def exchange(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the `index`-th conversation kept: what comes before the assistant's last turn, and that turn; int64."""
        span = self._span(int(self._kept[index]))
        trained, ids = self._trained[span], self._tokens[span].astype(np.int64)
        stop = len(trained) - int(trained[::-1].argmax())
        before = np.flatnonzero(~trained[:stop])
        start = int(before[-1]) + 1 if len(before) else 0
        return ids[:start], ids[start:stop]

    # -- parts ----------------------------------------------------------------------------------------------------

    def _learnable(self, lengths: np.ndarray) -> np.ndarray:
        """The conversations that fit and have a token to learn, int64 (N,)."""
        fits = lengths <= self.row_tokens if self.too_long == "drop" else np.full(len(lengths), True)
        return np.array([index for index in np.flatnonzero(fits).tolist() if self._learned(index).any()], np.int64)

    def _learned(self, conversation: int) -> np.ndarray:
        """Which tokens are labels: the assistant's, but for a first one, which nothing comes before; bool (T,)."""
        learned = self._trained[self._span(conversation)].copy()
        learned[:1] = False
        return learned

    def _span(self, conversation: int) -> slice:
        start, stop = self._starts[conversation : conversation + 2].tolist()
        return slice(start, min(stop, start + self.row_tokens))

    @cached_property
    def _weights(self) -> np.ndarray:
        return np.array([sum(int(self._learned(at).sum()) for at in row) for row in self._rows], np.int64)

    def _say_what_does_not_fit(self, count: int) -> None:
        if self.num_too_long:
            done = "left out" if self.too_long == "drop" else "cut off"
            logger.warning(
                "%d of %d %s conversations are longer than %d tokens and are %s (row_tokens, too_long)",
                *(self.num_too_long, count, self.folder.name, self.row_tokens, done),
            )
        empty = count - len(self._kept) - (self.num_too_long if self.too_long == "drop" else 0)
        if empty:
            logger.warning("%d of %d %s conversations have nothing to learn", empty, count, self.folder.name)

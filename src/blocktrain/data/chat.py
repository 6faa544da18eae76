"""Conversations to fine-tune on: rendered once by a chat template, then read as rows whose loss covers the assistant's
turns only.

    packed     | conversation 3 . . . | conversation 7 | conversation 1 | pad |     several in a row, kept apart
    positions    0 1 2 ...              0 1 2 ...        0 1 2 ...        0 1
    padded     | conversation 3 . . . | pad ............................ |          one in a row

Packed rows give the model `position_ids` that restart at each conversation. From these `transformers` builds masks that
let no token see another conversation, in the model's own code and so with its sliding windows. A few architectures
ignore them; `train/context.py` finds out which by running the model.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import torch

from blocktrain.data.bin_packing import best_fit
from blocktrain.data.cache_folder import cache_home, cached_folder
from blocktrain.data.chat_template import ChatTemplate, Rendered
from blocktrain.data.conversation import ConversationReader
from blocktrain.data.document import Document
from blocktrain.data.kinds import DataKind, TrainingData, register
from blocktrain.data.parallel_map import map_documents
from blocktrain.data.records import record_of
from blocktrain.data.row_report import RowError, RowReport, load_reports, save_reports, warn_of_unused
from blocktrain.data.splits import describe_validation, open_sources, training_and_validation
from blocktrain.data.tokenizer import load_tokenizer
from blocktrain.errors import ConfigError, DataError
from blocktrain.units import format_count

logger = logging.getLogger(__name__)

IGNORED = -100  # a label that the loss leaves out, as everywhere in transformers

_FORMAT = 2  # part of the key of every cache: raise it where the tokens of the same data change

ChatLayout = Literal["packed", "padded"]
TooLong = Literal["drop", "truncate"]


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Conversations to fine-tune on, with loss on the assistant's turns only.

    source: a file or folder of .jsonl, .json, .csv, .tsv (also .gz or .zst), .parquet or .arrow rows, or "owner/name"
        on the Hugging Face hub; rows of `messages`, ShareGPT's `conversations`, `prompt` and `completion`, `question`
        and `answer`, `query` and `response`, or Alpaca's.
    fields: for a field of these shapes, or the `role` and `content` of messages, the name that it has in the rows,
        such as { messages = "dialog", content = "text" }.
    roles: the role that a role of the rows stands for, besides ShareGPT's human and gpt, such as { bot = "assistant" }.
    validation: another source; none: the source's own validation or test split, else a share of it.
    validation_share: the share of the conversations that is held out where there is no such split.
    tokenizer: "bytes", a folder, or a model on the Hugging Face hub; none: that of `model.path`, and "bytes" for a
        model that is built from an `architecture`.
    template: a Jinja file; none: the tokenizer's own template, or a plain one where it has none.
    row_tokens: tokens in a row.
    layout: "packed" puts several conversations in a row and keeps them apart; "padded" puts one in a row and pads it.
    too_long: what happens to a conversation longer than a row; "truncate" cuts off its end.
    max_conversations: read at most this many conversations of each source.
    cache: a folder for the tokens; none: blocktrain's folder in the user's cache.
    """

    source: str
    fields: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    validation: str | None = None
    validation_share: float = 0.02
    tokenizer: str | None = None
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
        ConversationReader(self.fields, self.roles)  # raises ConfigError


def open_chat(config: ChatConfig, *, seed: int = 0) -> TrainingData[ChatRows]:
    """The rows of `config`; conversations are rendered and tokenized now if they are not in the cache yet. No seed
    matters.

    Warns of fields that are not read, and of rows that cannot be used, which are skipped. Raises `DataError` when data
    are missing, or more than 1 % of the rows have no known shape or are refused by the template; `StorageError` when
    the cache cannot be written.
    """
    del seed
    tokenizer = load_tokenizer(config.tokenizer, key="chat.tokenizer")
    template = ChatTemplate(tokenizer, config.template)
    home = cache_home(config.cache)
    corpora = open_sources(config.source, config.validation, text_field=None, cache=home)
    key = {
        "format": _FORMAT,
        "validation_share": config.validation_share,
        "max_conversations": config.max_conversations,
        "template": template.fingerprint,
        "fields": dict(config.fields),
        "roles": dict(config.roles),
    }
    reader = ConversationReader(config.fields, config.roles)

    def write(folder: Path) -> None:
        both = training_and_validation(corpora, share=config.validation_share, limit=config.max_conversations)
        parts = zip(("train", "validation"), both, strict=True)
        missing = Counter[str]()
        reports = [_encode(documents, reader, template, folder / name, missing) for name, documents in parts]
        rows = sum(report.count for report in reports)
        for name in config.fields.values():
            if missing[name] == rows:
                raise DataError(f"chat.fields names '{name}', but none of the {rows} conversations has it")
        for report in reports:
            report.check()
        save_reports(reports, folder)

    source, state = [corpus.name for corpus in corpora], [corpus.state() for corpus in corpora]
    folder = cached_folder(home, "chat", source=source, key=key, state=state, write=write)
    warn_of_unused(load_reports(folder), config.source, "chat.fields says which field is which")
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
    return TrainingData(
        unit="tokens",
        train=train,
        validation=validation,
        units_per_row=config.row_tokens,
        row_tokens=config.row_tokens,
        conversations=validation,
        fingerprint=train.fingerprint,
        tokenizer=tokenizer,
    )


def _encode(
    documents: Iterable[Document],
    reader: ConversationReader,
    template: ChatTemplate,
    folder: Path,
    missing: Counter[str],
) -> RowReport:
    """Write all conversations end to end: `tokens.bin`, uint32; `trained.bin`, a byte per token, 1 where the assistant
    wrote it; `starts.npy`, int64, where each conversation begins, and where the last one ends. Returns what was not
    used, and counts in `missing` the rows that do not have a field of `chat.fields`."""
    from datasets import Features, List, Value

    def encode(documents: list[Document]) -> pa.Table:
        notes: list[dict[str, object]] = []
        rendered: list[Rendered] = []
        for document in documents:
            record, place = record_of(document), f"'{document.id}'"
            note: dict[str, object] = {"missing": reader.missing(record)}
            notes.append(note)
            rendered.append(Rendered(text="", spans=()))
            try:
                conversation = reader.read(record, place)
                rendered[-1] = template.render(conversation, place)
                note["ignored"] = [*conversation.ignored, *template.unread(conversation)]
            except RowError as error:
                note["bad"] = str(error)
        ids, trained = zip(*template.encode(rendered), strict=True)
        starts = pa.array(np.cumsum([0, *map(len, ids)]), pa.int32())
        lists = [
            pa.ListArray.from_arrays(starts, pa.array(np.concatenate(values), type))
            for values, type in ((ids, pa.uint32()), (trained, pa.bool_()))
        ]
        return pa.table({"ids": lists[0], "trained": lists[1], "note": [json.dumps(note) for note in notes]})

    folder.mkdir()
    scratch = folder / "scratch"
    lengths: list[int] = []
    report = RowReport(rows=f"{folder.name} conversations")
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "trained.bin").open("wb") as marks:
        for table in map_documents(
            documents,
            encode,
            features=Features({"ids": List(Value("uint32")), "trained": List(Value("bool")), "note": Value("string")}),
            scratch=scratch,
            label=f"rendering {folder.name} conversations",
        ):
            ids, trained = (table.column(name).combine_chunks() for name in ("ids", "trained"))
            tokens.write(ids.flatten().to_numpy().data)  # a bad row has none
            marks.write(trained.flatten().to_numpy(zero_copy_only=False).astype(np.uint8).data)
            counts = ids.value_lengths().to_numpy().tolist()
            for count, note in zip(counts, map(json.loads, table.column("note").to_pylist()), strict=True):
                missing.update(note["missing"])
                if "bad" in note:
                    report.skip(note["bad"])
                else:
                    report.add(note["ignored"])
                    lengths.append(count)
    np.save(folder / "starts.npy", np.cumsum([0, *lengths], dtype=np.int64))
    shutil.rmtree(scratch)
    return report


class ChatRows:
    """Rows of `row_tokens` tokens from a folder of rendered conversations. Only the requested rows are read."""

    def __init__(
        self, folder: Path, *, row_tokens: int, pad: int, layout: ChatLayout = "packed", too_long: TooLong = "drop"
    ):
        """Assign the conversations to rows, and warn once about those that do not fit.

        pad: the token that fills up a row. Raises `DataError` if the folder is damaged, or if no conversation fits and
        has a token to learn.
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
        too_many = lengths > row_tokens
        self.num_too_long = int(too_many.sum())
        fits = np.flatnonzero(~too_many if too_long == "drop" else np.full(len(lengths), True))
        self._counts = self._num_learned(np.minimum(lengths, row_tokens))
        self._kept = fits[self._counts[fits] > 0]
        if not len(self._kept):
            raise DataError(
                f"none of the {len(lengths)} conversations fits into a row of {row_tokens} tokens (the shortest has "
                f"{lengths.min()}); raise row_tokens, or set too_long = 'truncate'"
            )
        if self.num_too_long:
            treatment = "left out" if too_long == "drop" else "cut off"
            logger.warning(
                "%d of %d %s conversations are longer than %d tokens and are %s (row_tokens, too_long)",
                *(self.num_too_long, len(lengths), folder.name, row_tokens, treatment),
            )
        if empty := len(fits) - len(self._kept):
            logger.warning("%d of %d %s conversations have nothing to learn", empty, len(lengths), folder.name)
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
        """Names these rows; the name of the folder depends on everything that its tokens were made from."""
        place = f"{self.folder.parent.parent.name}/{self.folder.parent.name}"
        return f"{place} {self.layout} in rows of {self.row_tokens}, too long: {self.too_long}"

    @property
    def num_conversations(self) -> int:
        """The number of conversations in the rows."""
        return len(self._kept)

    def tokens_that_hold(self, share: float) -> int:
        """The length of a row, in tokens, into which this share of all conversations fits whole."""
        return int(np.quantile(np.diff(self._starts), share, method="higher"))

    def weights(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """The number of tokens in each row that count in the loss, int64 (B,)."""
        return self._weights[np.asarray(indices, np.int64)]

    def conversations(self, index: int) -> list[np.ndarray]:
        """The tokens of each conversation in row `index`, left to right, int64 (T,)."""
        return [self._tokens[self._span(member)].astype(np.int64) for member in self._rows[index]]

    def batch(self, indices: Sequence[int] | np.ndarray, *, variant: int = 0) -> dict[str, torch.Tensor]:
        """Rows `indices` as `input_ids` and `labels`, int64 (B, T); a label is -100 where nothing is learned.

        Packed rows also have `position_ids`, padded rows `attention_mask`, both int64 (B, T). Conversations are not
        augmented, so `variant` changes nothing.
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
        other = {"position_ids": positions} if self.layout == "packed" else {"attention_mask": mask}
        return {name: torch.from_numpy(value) for name, value in {"input_ids": ids, "labels": labels, **other}.items()}

    def prompt_and_answer(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens before the assistant's last turn of the `index`-th conversation, and those of the turn; int64."""
        span = self._span(int(self._kept[index]))
        trained, ids = self._trained[span], self._tokens[span].astype(np.int64)
        stop = len(trained) - int(trained[::-1].argmax())
        before = np.flatnonzero(~trained[:stop])
        start = int(before[-1]) + 1 if len(before) else 0
        return ids[:start], ids[start:stop]

    def _learned(self, conversation: int) -> np.ndarray:
        """Which tokens are learned: the assistant's, except the first of all, which nothing predicts; bool (T,)."""
        learned = self._trained[self._span(conversation)].copy()
        learned[:1] = False
        return learned

    def _span(self, conversation: int) -> slice:
        start, stop = self._starts[conversation : conversation + 2].tolist()
        return slice(start, min(stop, start + self.row_tokens))

    def _num_learned(self, lengths: np.ndarray) -> np.ndarray:
        """How many tokens are learned of the first `lengths` tokens of each conversation, int64 (N,)."""
        counts = np.zeros(len(lengths), np.int64)
        some = lengths > 1  # the first is never learned
        starts = self._starts[:-1][some]
        if edges := np.stack([starts + 1, starts + lengths[some]], axis=1).ravel().tolist():
            inside = edges if edges[-1] < len(self._trained) else edges[:-1]
            counts[some] = np.add.reduceat(self._trained, inside, dtype=np.int64)[::2]
        return counts

    @cached_property
    def _weights(self) -> np.ndarray:
        return np.array([self._counts[row].sum() for row in self._rows], np.int64)


def _describe(config: ChatConfig) -> str:
    rows = f"`{config.source}` in rows of {config.row_tokens} tokens of `{config.tokenizer}`"
    validation = describe_validation(config.validation, config.validation_share, "conversations")
    return f"Conversations, with loss on the assistant's turns: {rows}; {validation}"


register(
    DataKind(name="chat", config=ChatConfig, open=open_chat, describe=_describe, has_vocabulary=True, can_generate=True)
)

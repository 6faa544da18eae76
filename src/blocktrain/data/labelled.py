"""Texts with labels, to fine-tune a classifier on, such as sentiment or intents."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from blocktrain.data.cache_folder import cache_home, cached_folder
from blocktrain.data.document import Document
from blocktrain.data.kinds import DataKind, TrainingData, register
from blocktrain.data.records import Record, record_of, require_text
from blocktrain.data.row_report import (
    RowError,
    RowReport,
    filled_fields,
    load_reports,
    save_reports,
    warn_of_unused,
)
from blocktrain.data.splits import describe_validation, open_sources, training_and_validation
from blocktrain.data.tokenizer import Tokenizer, load_tokenizer
from blocktrain.errors import ConfigError, DataError, nearest
from blocktrain.runtime import permutation
from blocktrain.units import format_count

logger = logging.getLogger(__name__)

_FORMAT = 3
_TEXTS_PER_BATCH = 1024  # passed to the tokenizer at once


@dataclass(frozen=True, kw_only=True)
class LabelledConfig:
    """Texts to train a classifier on.

    source: a file or folder of .jsonl, .json, .csv, .tsv (also .gz or .zst), .parquet or .arrow rows, or "owner/name"
        on the Hugging Face hub.
    validation: another source; none: the source's own validation or test split, else a share of it.
    validation_share: the share of the texts that is held out where there is no such split.
    text_field: the field of a row that holds the text.
    label_field: the field whose values, text or whole numbers, are the classes.
    tokenizer: "bytes", a folder, or a model on the Hugging Face hub; none: that of `model.path`, and "bytes" for a
        model that is built from an `architecture`.
    row_tokens: tokens in a row; longer texts are cut off.
    max_documents: read at most this many texts of each source.
    cache: a folder for the tokens; none: blocktrain's folder in the user's cache.
    """

    source: str
    validation: str | None = None
    validation_share: float = 0.02
    text_field: str = "text"
    label_field: str = "label"
    tokenizer: str | None = None
    row_tokens: int = 128
    max_documents: int | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.validation_share < 1:
            raise ConfigError(f"validation_share is {self.validation_share}; it must be between 0 and 1, like 0.02")
        if self.row_tokens < 1:
            raise ConfigError(f"row_tokens must be at least 1, not {self.row_tokens}")
        if self.max_documents is not None and self.max_documents < 1:
            raise ConfigError(f"max_documents is {self.max_documents}; it must be at least 1, or left out for all")


def open_labelled(config: LabelledConfig, *, seed: int = 0) -> TrainingData[LabelledRows]:
    """The texts of `config`, tokenized now if they are not in the cache yet. The classes are those of the training
    texts. No seed matters.

    Warns of fields that are not read, and of rows that cannot be used, which are skipped. Raises `DataError` when data
    are missing, more than 1 % of the rows have no text or label, or a validation text has a class that no training text
    has;
    `StorageError` when the cache cannot be written.
    """
    del seed
    tokenizer = load_tokenizer(config.tokenizer, key="labelled.tokenizer")
    home = cache_home(config.cache)
    corpora = open_sources(config.source, config.validation, text_field=None, cache=home)
    key = {
        "format": _FORMAT,
        "validation_share": config.validation_share,
        "fields": [config.text_field, config.label_field],
        "max_documents": config.max_documents,
        "tokenizer": tokenizer.fingerprint,
    }

    def write(folder: Path) -> None:
        train, validation = training_and_validation(corpora, share=config.validation_share, limit=config.max_documents)
        labels, report = _encode(train, config, tokenizer, folder / "train")
        # In a fixed random order: an evaluation takes the first rows, and many files are sorted by class.
        in_file_order = list(validation)
        shuffled = [in_file_order[index] for index in permutation(len(in_file_order), 0)]
        others, other_report = _encode(shuffled, config, tokenizer, folder / "validation")
        save_reports([report, other_report], folder)
        classes = sorted(set(labels))
        if all(name.isdecimal() for name in classes):
            classes.sort(key=int)
        if unknown := sorted(set(others) - set(classes)):
            raise DataError(f"validation texts have the class '{unknown[0]}', which no training text has")
        numbers = {name: number for number, name in enumerate(classes)}
        for name, values in (("train", labels), ("validation", others)):
            np.save(folder / name / "labels.npy", np.array([numbers[value] for value in values], np.int64))
        (folder / "classes.json").write_text(json.dumps(classes))

    source, state = [corpus.name for corpus in corpora], [corpus.state() for corpus in corpora]
    folder = cached_folder(home, "labelled", source=source, key=key, state=state, write=write)
    warn_of_unused(load_reports(folder), config.source, "text_field and label_field name the fields that are")
    pad = tokenizer.pretrained.pad_token_id
    pad = pad if isinstance(pad, int) else tokenizer.eos
    train, validation = (
        LabelledRows(folder / name, row_tokens=config.row_tokens, pad=pad) for name in ("train", "validation")
    )
    return TrainingData(
        unit="texts",
        train=train,
        validation=validation,
        units_per_row=1,
        row_tokens=config.row_tokens,
        classes=tuple(json.loads((folder / "classes.json").read_text())),
        pad_token=pad,
        fingerprint=train.fingerprint,
        tokenizer=tokenizer,
    )


def _encode(
    documents: Iterable[Document], config: LabelledConfig, tokenizer: Tokenizer, folder: Path
) -> tuple[list[str], RowReport]:
    """Write all texts end to end, with the special tokens that an encoder expects: `tokens.bin`, uint32, and
    `starts.npy`, int64, where each text begins and the last one ends. Returns the labels, and what was not used; raises
    `DataError` if that is too much."""
    folder.mkdir()
    starts, labels, texts = [0], [], []
    report = RowReport(rows=f"{folder.name} texts")

    def flush() -> None:
        for ids in tokenizer.pretrained(texts, verbose=False)["input_ids"] if texts else ():
            tokens.write(np.array(ids, np.uint32).data)
            starts.append(starts[-1] + len(ids))
        texts.clear()

    with (folder / "tokens.bin").open("wb") as tokens:
        for document in documents:
            record = record_of(document)
            try:
                text, label = _text_and_label(record, config, f"'{document.id}'")
            except RowError as error:
                report.skip(str(error))
                continue
            report.add(filled_fields(record, but=(config.text_field, config.label_field)))
            texts.append(text)
            labels.append(label)
            if len(texts) == _TEXTS_PER_BATCH:
                flush()
        flush()
    report.check()
    np.save(folder / "starts.npy", np.array(starts, np.int64))
    return labels, report


def _text_and_label(record: Record, config: LabelledConfig, place: str) -> tuple[str, str]:
    for setting, field in (("text_field", config.text_field), ("label_field", config.label_field)):
        if field not in record:
            raise RowError(f"{place} has no field '{field}'; {nearest(field, record)} ({setting})")
    text, label = record[config.text_field], record[config.label_field]
    if not isinstance(label, str | int):
        raise RowError(f"{place}: a label is text or a whole number, not {label!r}")
    return require_text(text, config.text_field, place), str(label)


class LabelledRows:
    """Texts as rows of `row_tokens` tokens, cut off or padded, with their classes."""

    def __init__(self, folder: Path, *, row_tokens: int, pad: int):
        """Map a folder that `open_labelled` filled, and warn once about texts that are cut off.

        pad: the token that fills up a row. Raises `DataError` if the folder is damaged.
        """
        self.folder = folder
        self.row_tokens = row_tokens
        self._pad = pad
        try:
            self._starts = np.load(folder / "starts.npy")
            self.labels = np.load(folder / "labels.npy")
            self._tokens = np.memmap(folder / "tokens.bin", np.uint32, "r", shape=int(self._starts[-1]))
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"'{folder}' is not a folder of labelled texts ({error}); delete it") from error
        self.num_cut = int((np.diff(self._starts) > row_tokens).sum())
        if self.num_cut:
            logger.warning(
                "%d of %d %s texts are longer than %d tokens and are cut off (row_tokens)",
                *(self.num_cut, len(self), folder.name, row_tokens),
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"LabelledRows({format_count(len(self))} texts of {self.row_tokens} tokens)"

    @property
    def fingerprint(self) -> str:
        """Names these rows; the name of the folder depends on everything that its tokens were made from."""
        return f"{self.folder.parent.parent.name}/{self.folder.parent.name} in rows of {self.row_tokens}"

    def weights(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """One prediction per text: ones, int64 (B,)."""
        return np.ones(len(indices), np.int64)

    def batch(self, indices: Sequence[int] | np.ndarray, *, variant: int = 0) -> dict[str, torch.Tensor]:
        """Texts `indices` as `input_ids` and `attention_mask`, int64 (B, T), and their classes, `labels`, int64 (B,).

        Texts are not augmented, so `variant` changes nothing.
        """
        del variant
        shape = (len(indices), self.row_tokens)
        ids, mask = np.full(shape, self._pad, np.int64), np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            start, stop = self._starts[index : index + 2].tolist()
            length = min(stop - start, self.row_tokens)
            ids[row, :length] = self._tokens[start : start + length]
            mask[row, :length] = 1
        labels = torch.from_numpy(self.labels[np.asarray(indices, np.int64)])
        return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask), "labels": labels}


def _describe(config: LabelledConfig) -> str:
    rows = f"`{config.source}` in rows of {config.row_tokens} tokens of `{config.tokenizer}`"
    validation = describe_validation(config.validation, config.validation_share, "texts")
    return f"Texts by `{config.label_field}`: {rows}; {validation}"


register(DataKind(name="labelled", config=LabelledConfig, open=open_labelled, describe=_describe))

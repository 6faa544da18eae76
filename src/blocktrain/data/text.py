"""Running text: documents tokenized end to end, in rows of equal length, every token of which is predicted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blocktrain.data.cache_folder import cache_home, cached_folder
from blocktrain.data.kinds import DataKind, TrainingData, register
from blocktrain.data.row_report import RowReport, load_reports, save_reports, warn_of_unused
from blocktrain.data.splits import describe_validation, open_sources, training_and_validation
from blocktrain.data.token_rows import TokenRows
from blocktrain.data.tokenize import FORMAT, tokenize_documents
from blocktrain.data.tokenizer import load_tokenizer
from blocktrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Which text to train on, and how it is cut into rows.

    source: "stdlib" (the Python files of this interpreter), a file, a folder, or "owner/name" on the Hugging Face hub.
    validation: another source; none: the source's own validation or test split, else a share of it.
    validation_share: the share of the documents that is held out where there is no such split.
    text_field: the field of a .jsonl (also .gz or .zst), .parquet or .arrow row that holds the text.
    tokenizer: "bytes", a folder, or a model on the Hugging Face hub; none: that of `model.path`, and "bytes" for a
        model that is built from an `architecture`.
    row_tokens: tokens in a row.
    max_documents: read at most this many documents of each source.
    cache: a folder for the tokens; none: blocktrain's folder in the user's cache.
    """

    source: str = "stdlib"
    validation: str | None = None
    validation_share: float = 0.02
    text_field: str = "text"
    tokenizer: str | None = None
    row_tokens: int = 128
    max_documents: int | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.validation_share < 1:
            raise ConfigError(f"validation_share is {self.validation_share}; it must be between 0 and 1, like 0.02")
        if self.row_tokens < 2:
            raise ConfigError(f"row_tokens is {self.row_tokens}; a row needs at least 2 tokens to predict one")
        if self.max_documents is not None and self.max_documents < 1:
            raise ConfigError(f"max_documents is {self.max_documents}; it must be at least 1, or left out for all")


def open_text(config: TextConfig, *, seed: int = 0) -> TrainingData[TokenRows]:
    """The rows of `config`; the text is tokenized now if its tokens are not in the cache yet. No seed matters.

    Warns of rows without a text, which are skipped. Raises `DataError` when data are missing, empty, unreadable, or
    less than one row, or more than 1 % of the rows have no text; `StorageError` when the cache cannot be written.
    """
    del seed
    tokenizer = load_tokenizer(config.tokenizer, key="text.tokenizer")
    home = cache_home(config.cache)
    corpora = open_sources(config.source, config.validation, text_field=config.text_field, cache=home)
    key = {
        "format": FORMAT,
        "validation_share": config.validation_share,
        "text_field": config.text_field,
        "max_documents": config.max_documents,
        "tokenizer": tokenizer.fingerprint,
    }

    def write(folder: Path) -> None:
        train, validation = training_and_validation(corpora, share=config.validation_share, limit=config.max_documents)
        reports = [RowReport(rows=f"{name} documents") for name in ("train", "validation")]
        tokenize_documents(train, tokenizer, folder / "train", reports[0])
        tokenize_documents(validation, tokenizer, folder / "validation", reports[1])
        for report in reports:
            report.check()
        save_reports(reports, folder)

    source, state = [corpus.name for corpus in corpora], [corpus.state() for corpus in corpora]
    folder = cached_folder(home, "text", source=source, key=key, state=state, write=write)
    warn_of_unused(load_reports(folder), config.source, "")
    train = TokenRows.open(folder / "train", row_tokens=config.row_tokens)
    validation = TokenRows.open(folder / "validation", row_tokens=config.row_tokens)
    return TrainingData(
        unit="tokens",
        train=train,
        validation=validation,
        units_per_row=config.row_tokens,
        row_tokens=config.row_tokens,
        bytes_per_token=validation.bytes_per_token,
        fingerprint=train.fingerprint,
        tokenizer=tokenizer,
    )


def _describe(config: TextConfig) -> str:
    rows = f"`{config.source}` in rows of {config.row_tokens} tokens of `{config.tokenizer}`"
    return f"Text: {rows}; {describe_validation(config.validation, config.validation_share, 'documents')}"


register(DataKind(name="text", config=TextConfig, open=open_text, describe=_describe, has_vocabulary=True))

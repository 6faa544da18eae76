"""From a text configuration to training and validation rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blocktrain.data.cachefolder import cached_folder, default_home
from blocktrain.data.splits import open_sources, splits
from blocktrain.data.token_rows import TokenRows
from blocktrain.data.tokenize import FORMAT, pack
from blocktrain.data.tokenizer import Tokenizer, load_tokenizer
from blocktrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Which text to train on, and how it is cut into rows.

    source: "stdlib" (the Python files of this interpreter), a file, a folder, or "owner/name" on the Hugging Face hub.
    validation: another source; none: the source's own validation or test split, else a share of it.
    validation_share: of the documents, where there is no such split.
    text_field: the field of a .jsonl, .parquet or .arrow row that holds the text.
    tokenizer: "bytes", a folder, or a model on the Hugging Face hub.
    row_tokens: tokens in a row.
    max_documents: read only so many of each source.
    cache: a folder for the tokens; none: blocktrain's in the user's cache folder.
    """

    source: str = "stdlib"
    validation: str | None = None
    validation_share: float = 0.02
    text_field: str = "text"
    tokenizer: str = "bytes"
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


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Rows to train on, rows to validate on (never the same documents), and the tokenizer that made both."""

    train: TokenRows
    validation: TokenRows
    tokenizer: Tokenizer


def open_text(config: TextConfig) -> TextData:
    """The rows of `config`, tokenised now if they are not in the cache yet.

    Raises `DataError` when data are missing, empty, not readable as asked, or less than one row; `StorageError` when
    the cache cannot be written.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    corpora = open_sources(config.source, config.validation, text_field=config.text_field)
    key = {
        "format": FORMAT,
        "corpora": [corpus.name for corpus in corpora],
        "validation_share": config.validation_share,
        "text_field": config.text_field,
        "max_documents": config.max_documents,
        "tokenizer": tokenizer.fingerprint,
    }

    def write(folder: Path) -> None:
        train, validation = splits(corpora, share=config.validation_share, limit=config.max_documents)
        pack(train, tokenizer, folder / "train")
        pack(validation, tokenizer, folder / "validation")

    home = Path(config.cache).expanduser() if config.cache else default_home()
    folder = cached_folder(home, "text", key=key, state=[corpus.state() for corpus in corpora], write=write)
    return TextData(
        train=TokenRows.open(folder / "train", row_tokens=config.row_tokens),
        validation=TokenRows.open(folder / "validation", row_tokens=config.row_tokens),
        tokenizer=tokenizer,
    )

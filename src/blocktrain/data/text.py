"""From a text configuration to training and validation rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blocktrain.data.cachefolder import cached_folder, default_home
from blocktrain.data.pack import FORMAT, pack
from blocktrain.data.splits import open_sources, splits
from blocktrain.data.tokenizer import Tokenizer, load_tokenizer
from blocktrain.data.tokenrows import TokenRows
from blocktrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Which text to train on, and how it is cut into rows."""

    source: str = "stdlib"  # "stdlib", a file, a folder, or "owner/name" on the Hugging Face hub
    validation: str | None = None  # another source; None: the source's own validation or test split, else a share of it
    validation_share: float = 0.02  # of the documents, where there is no such split
    text_field: str = "text"  # the field of a .jsonl, .parquet or .arrow row that holds the text
    tokenizer: str = "bytes"  # "bytes", a folder, or a model on the Hugging Face hub
    row_tokens: int = 128
    max_documents: int | None = None  # read only so many of each source
    cache: str | None = None  # a folder for the tokens; None: blocktrain's in the user's cache folder

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

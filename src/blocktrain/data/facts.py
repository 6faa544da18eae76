"""What a trained model needs to know of the data it was trained on. Each checkpoint keeps these facts, so that no
export needs the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.data.hub import is_hub_name
from blocktrain.data.kinds import DataConfig, TrainingData
from blocktrain.data.tokenizer import Tokenizer, load_tokenizer
from blocktrain.errors import DataError


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Facts of opened data; None where data of that kind have none.

    vocab_size: the tokenizer's vocabulary.
    row_tokens, classes, pad_token: see `TrainingData`.
    tokenizer: its name, with which `load_tokenizer` finds it.
    tokenizer_fingerprint: its hash.
    chat_template: the template that is set on the tokenizer, or several by name.
    datasets: the data sets of the Hugging Face hub among the sources.
    """

    vocab_size: int | None = None
    row_tokens: int | None = None
    classes: tuple[str, ...] | None = None
    pad_token: int | None = None
    tokenizer: str | None = None
    tokenizer_fingerprint: str | None = None
    chat_template: str | dict[str, str] | None = None
    datasets: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: TrainingData, config: DataConfig) -> DataFacts:
        """The facts of `data`, which was opened as `config` says."""
        tokenizer = data.tokenizer
        sources = (config.source, getattr(config, "validation", None))
        on_hub = [name for name in sources if name and is_hub_name(name) and not Path(name).expanduser().exists()]
        return cls(
            vocab_size=None if tokenizer is None else tokenizer.vocab_size,
            row_tokens=data.row_tokens,
            classes=data.classes,
            pad_token=data.pad_token,
            tokenizer=None if tokenizer is None else tokenizer.name,
            tokenizer_fingerprint=None if tokenizer is None else tokenizer.fingerprint,
            chat_template=None if tokenizer is None else tokenizer.pretrained.chat_template,
            datasets=tuple(dict.fromkeys(name.partition(":")[0] for name in on_hub)),
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> DataFacts:
        """The inverse of `dataclasses.asdict`, also after JSON has made lists of tuples."""
        found: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**found)

    def load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer with its chat template, as it was in training; raises `DataError` if it is not there any more,
        or has changed."""
        if self.tokenizer is None:
            return None
        tokenizer = load_tokenizer(self.tokenizer)
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise DataError(
                f"tokenizer '{self.tokenizer}' has changed since the model was trained with it, so its tokens may mean "
                "something else now; restore its files"
            )
        tokenizer.pretrained.chat_template = self.chat_template
        return tokenizer

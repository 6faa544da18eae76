"""The kinds of training data, and what each of them hands to the trainer.

A kind is one file: a configuration dataclass, a function that opens it, and a call of `register`. Importing
`blocktrain.data` imports the four kinds of this package (text, chat, labelled, images), so `DATA_KINDS` then has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from torch import Tensor

from blocktrain.data.tokenizer import Tokenizer


class Rows(Protocol):
    """Training or validation rows, read by their index."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int] | np.ndarray, *, variant: int = 0) -> dict[str, Tensor]:
        """The keyword arguments of the model's forward call for these rows; `variant` selects the augmentation of an
        image."""
        ...

    def weights(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """How many predictions each of these rows contributes to the mean loss, int64 (B,)."""
        ...


class Conversations(Protocol):
    """Conversations whose last answer the model can be asked to write itself."""

    @property
    def num_conversations(self) -> int:
        """How many conversations there are."""
        ...

    def prompt_and_answer(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens before the assistant's last turn and the tokens of that turn, both int64."""
        ...


RowsT_co = TypeVar("RowsT_co", bound=Rows, covariant=True)


@dataclass(frozen=True, kw_only=True)
class TrainingData(Generic[RowsT_co]):
    """Opened data: rows to train on, rows to validate on, and what a model and a report need to know about them.

    unit: what a run counts: tokens, images or labelled texts.
    units_per_row: tokens in a row of text; 1 for an image or a labelled text.
    row_tokens: the length of a row of any kind of text.
    bytes_per_token: the mean over the validation text, where every token of it is predicted.
    classes: the names of the classes, or their numbers, where rows are classified.
    pad_token: the token that fills up labelled texts.
    conversations: the validation conversations, where answers can be generated for them.
    augmented: whether a training row looks different in each variant.
    fingerprint: names the training rows; checkpoints and prefix caches are tied to it.
    tokenizer: the tokenizer that made the rows; None for images.
    """

    unit: Literal["tokens", "images", "texts"]
    train: RowsT_co
    validation: RowsT_co
    units_per_row: int
    fingerprint: str
    row_tokens: int | None = None
    bytes_per_token: float | None = None
    classes: tuple[str, ...] | None = None
    pad_token: int | None = None
    conversations: Conversations | None = None
    augmented: bool = False
    tokenizer: Tokenizer | None = None


class DataConfig(Protocol):
    """The configuration dataclass of a kind."""

    @property
    def source(self) -> str:
        """Where the data come from; model cards name it."""
        ...


ConfigT = TypeVar("ConfigT", bound=DataConfig)
ConfigT_contra = TypeVar("ConfigT_contra", bound=DataConfig, contravariant=True)


class OpenData(Protocol[ConfigT_contra]):
    """Opens the data of one configuration."""

    def __call__(self, config: ConfigT_contra, /, *, seed: int) -> TrainingData:
        """`seed` is the seed of the run; raises `DataError` where the data cannot be used."""
        ...


@dataclass(frozen=True, kw_only=True)
class DataKind(Generic[ConfigT]):
    """A kind of training data.

    name: the table of the TOML file that configures it.
    config: the dataclass that the table maps to; it is keyword-only and checks its own values. If it has a field
        `tokenizer` that is None, the configuration of a run sets it to `model.path`, or to "bytes" where there is none.
    open: reads the data, or finds them in the cache.
    describe: the "Data" section of a model card: one sentence in Markdown.
    has_vocabulary: the model predicts the next token, so its loss can be computed in chunks of tokens.
    can_generate: the data have prompts whose answers the model can be asked to write.
    has_variants: training rows can be augmented, in a limited number of variants.
    """

    name: str
    config: type[ConfigT]
    open: OpenData[ConfigT]
    describe: Callable[[ConfigT], str]
    has_vocabulary: bool = False
    can_generate: bool = False
    has_variants: bool = False


DATA_KINDS: dict[str, DataKind[Any]] = {}


def register(kind: DataKind[Any]) -> None:
    """Add `kind` to `DATA_KINDS`; raises `ValueError` if another kind has its name or its configuration class."""
    for other in DATA_KINDS.values():
        if other.name == kind.name or other.config is kind.config:
            raise ValueError(f"a data kind '{other.name}' with {other.config.__name__} is registered already")
    DATA_KINDS[kind.name] = kind


def kind_of(config: DataConfig) -> DataKind[Any]:
    """The kind that `config` is the configuration of; raises `KeyError` if no such kind is registered."""
    for kind in DATA_KINDS.values():
        if type(config) is kind.config:
            return kind
    raise KeyError(f"{type(config).__name__} is the configuration of no registered data kind")

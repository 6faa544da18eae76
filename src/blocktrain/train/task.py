"""What a model is trained for, next tokens or classes: rows to a loss, validation rows to a score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from blocktrain.parallel.ranks import Ranks

Batch = Mapping[str, Tensor]


class Rows(Protocol):
    """Training or validation rows by index; `variant` selects the augmentation of an image."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int] | np.ndarray, *, variant: int = 0) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward call for these rows."""
        ...

    def weights(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """How many predictions each of these rows has a share of the mean loss for, int64 (B,)."""
        ...


class Exchanges(Protocol):
    """Prompts, and the answers they should get."""

    @property
    def num_conversations(self) -> int:
        """How many there are."""
        ...

    def exchange(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of prompt and answer, int64."""
        ...


@dataclass(frozen=True, kw_only=True)
class Score:
    """A mean over validation rows. `loss` in nats per token (or image, or text); `exact_match`: share of the answers
    written that are right."""

    loss: float
    loss_per_byte: float | None = None
    accuracy: float | None = None
    exact_match: float | None = None

    def to_event(self) -> dict[str, Any]:
        """As the fields of an evaluation record."""
        figures = {"loss": self.loss, "loss_per_byte": self.loss_per_byte, "accuracy": self.accuracy}
        return figures if self.exact_match is None else {**figures, "exact_match": self.exact_match}


@dataclass(frozen=True, kw_only=True)
class Task:
    """Rows to train on, rows to evaluate on, and what one row counts for.

    units_per_row: tokens in a row of text, 1 for an image or a labelled text. row_tokens: of text of any kind.
    bytes_per_token: of the validation text, where all of it is predicted. classes: names, or numbers, of what is told
    apart. pad_token: what fills labelled texts up. exchanges: validation conversations that can be asked for.
    augmented: whether training rows differ by variant. fingerprint: of the training rows, for what refers to them.
    """

    unit: Literal["tokens", "images", "texts"]
    train: Rows
    validation: Rows
    units_per_row: int
    row_tokens: int | None = None
    bytes_per_token: float | None = None
    classes: tuple[str, ...] | None = None
    pad_token: int | None = None
    exchanges: Exchanges | None = None
    augmented: bool = False
    fingerprint: str = ""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss of a batch (0-d, differentiable): the model's own, as Hugging Face models return it."""
        return model(**batch).loss

    @torch.no_grad()
    def score(
        self, model: nn.Module, *, rows: int, batch_rows: int, device: torch.device, ranks: Ranks | None = None
    ) -> Score:
        """Mean loss over the first `rows` validation rows. The model must be in eval mode.

        The ranks take turns with the batches; the sum over these is exact, so it does not matter how many ranks.
        """
        ranks = ranks or Ranks()
        rows = min(rows, len(self.validation))
        starts = range(0, rows, batch_rows)
        losses, weights, correct = [], [], 0
        mine = list(starts[ranks.rank :: ranks.size])
        idle = -(-len(starts) // ranks.size) - len(mine)  # this rank's share is one batch shorter than another's
        for start in mine:
            indices = range(start, min(start + batch_rows, rows))
            batch = to_device(self.validation.batch(indices), device)
            output = model(**batch)
            weights.append(int(self.validation.weights(indices).sum()))
            losses.append(output.loss.item() * weights[-1])
            if self.classes is not None:
                correct += int((output.logits.argmax(-1) == batch["labels"]).sum())
        if idle:  # sharded weights are gathered by all ranks together, so all run the model equally often
            model(**to_device(self.validation.batch([0]), device))
        told = ranks.all_gather([correct, sum(weights), *losses, *[0.0] * idle])
        correct, weight = (int(sum(theirs[at] for theirs in told)) for at in (0, 1))
        loss = math.fsum(loss for theirs in told for loss in theirs[2:]) / weight
        if self.classes is not None:
            return Score(loss=loss, accuracy=correct / rows)
        return Score(loss=loss, loss_per_byte=None if self.bytes_per_token is None else loss / self.bytes_per_token)


def to_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The batch on `device`, copied without waiting where the host memory allows it."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

"""Scoring a model on validation rows: the mean loss, and the accuracy of a classifier."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from blocktrain.data.batch import to_device
from blocktrain.data.kinds import TrainingData
from blocktrain.parallel.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Score:
    """Means over validation rows.

    loss: in nats per token, image or text. loss_per_byte: in nats per byte of text, where every token is predicted.
    accuracy: the share of rows that are classified correctly. exact_match: the share of generated answers that are
    correct.
    """

    loss: float
    loss_per_byte: float | None = None
    accuracy: float | None = None
    exact_match: float | None = None

    def to_event(self) -> dict[str, float | None]:
        """The fields of an evaluation record."""
        fields = {"loss": self.loss, "loss_per_byte": self.loss_per_byte, "accuracy": self.accuracy}
        return fields if self.exact_match is None else {**fields, "exact_match": self.exact_match}


@torch.no_grad()
def score(
    data: TrainingData,
    model: nn.Module,
    *,
    rows: int,
    batch_rows: int,
    device: torch.device,
    ranks: Ranks | None = None,
) -> Score:
    """The score of `model` on the first `rows` validation rows, `batch_rows` at a time. The model must be in eval mode.

    Collective where there are several ranks: they take turns with the batches. The losses are summed exactly, so the
    score does not depend on the number of ranks.
    """
    ranks = ranks or Ranks()
    rows = min(rows, len(data.validation))
    starts = range(0, rows, batch_rows)
    losses, weights, correct = [], [], 0
    own_starts = list(starts[ranks.rank :: ranks.size])
    missing = -(-len(starts) // ranks.size) - len(own_starts)  # 1 where another rank has one batch more, else 0
    for start in own_starts:
        indices = range(start, min(start + batch_rows, rows))
        batch = to_device(data.validation.batch(indices), device)
        output = model(**batch)
        weights.append(int(data.validation.weights(indices).sum()))
        losses.append(output.loss.item() * weights[-1])
        if data.classes is not None:
            correct += int((output.logits.argmax(-1) == batch["labels"]).sum())
    if missing:  # sharded weights are all-gathered in the forward pass, so every rank must run it equally often
        model(**to_device(data.validation.batch([0]), device))
    gathered = ranks.all_gather([correct, sum(weights), *losses, *[0.0] * missing])
    correct, weight = (int(sum(figures[at] for figures in gathered)) for at in (0, 1))
    loss = math.fsum(loss for figures in gathered for loss in figures[2:]) / weight
    if data.classes is not None:
        return Score(loss=loss, accuracy=correct / rows)
    return Score(loss=loss, loss_per_byte=None if data.bytes_per_token is None else loss / data.bytes_per_token)

"""Opening the data of a run, and checking that the model can be trained on rows that are laid out like this."""

from __future__ import annotations

import torch
from torch import nn

from blocktrain.chain.freezing import evaluating
from blocktrain.data.batch import to_device
from blocktrain.data.chat import ChatRows
from blocktrain.data.kinds import TrainingData, kind_of
from blocktrain.errors import ConfigError
from blocktrain.train.config import RunConfig


def open_data(config: RunConfig) -> TrainingData:
    """The data of the one data table that `config` has."""
    return kind_of(config.data).open(config.data, seed=config.seed)


@torch.no_grad()
def require_separate_conversations(model: nn.Module, data: TrainingData) -> None:
    """Raise `ConfigError` if `model` lets conversations that are packed into one row see each other.

    Compares the logits of one row of several conversations with those of each conversation alone: architectures that
    build their masks without position ids (OPT, BLOOM and Falcon in transformers 5.23) take such a row for one text.
    """
    rows = data.train
    if not isinstance(rows, ChatRows) or rows.layout != "packed":
        return
    packed = next((index for index in range(len(rows)) if len(rows.conversations(index)) > 1), None)
    if packed is None:
        return
    device = next(model.parameters()).device
    with evaluating(model):
        row_logits = model(**to_device(rows.batch([packed]), device)).logits[0]  # (T, vocabulary)
        at = 0
        for ids in rows.conversations(packed):
            alone = model(input_ids=torch.from_numpy(ids)[None].to(device)).logits[0]
            in_row = row_logits[at : at + len(ids)]
            if not torch.allclose(in_row, alone, rtol=1e-3, atol=1e-3 * float(alone.abs().max())):
                raise ConfigError(
                    f"{type(model).__name__} does not keep the conversations of a packed row apart (its masks do not "
                    "follow from position ids); set chat.layout = 'padded'"
                )
            at += len(ids)

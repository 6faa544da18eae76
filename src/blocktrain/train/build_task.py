"""From the data table of a configuration to a task, and whether the model can be trained on it as it is laid out."""

from __future__ import annotations

import torch
from torch import nn

from blocktrain.chain.freezing import evaluating
from blocktrain.data.chat import ChatConfig, ChatRows, open_chat
from blocktrain.data.images import ImageConfig, open_images
from blocktrain.data.labelled import LabelledConfig, open_labelled, padding_token
from blocktrain.data.text import TextConfig, open_text
from blocktrain.data.tokenizer import Tokenizer
from blocktrain.errors import ConfigError
from blocktrain.train.config import RunConfig
from blocktrain.train.task import Task, to_device


def build_task(config: RunConfig) -> tuple[Task, Tokenizer | None]:
    """The task of the one data table that `config` has, and its tokenizer where it is text."""
    if config.text is not None:
        return _text(config.text)
    if config.chat is not None:
        return _chat(config.chat)
    if config.labelled is not None:
        return _labelled(config.labelled)
    assert config.images is not None
    return _images(config.images, config.seed), None


def _text(config: TextConfig) -> tuple[Task, Tokenizer]:
    text = open_text(config)
    task = Task(
        unit="tokens",
        train=text.train,
        validation=text.validation,
        units_per_row=config.row_tokens,
        row_tokens=config.row_tokens,
        bytes_per_token=text.validation.bytes_per_token,
        fingerprint=text.train.fingerprint,
    )
    return task, text.tokenizer


def _chat(config: ChatConfig) -> tuple[Task, Tokenizer]:
    chat = open_chat(config)
    task = Task(
        unit="tokens",
        train=chat.train,
        validation=chat.validation,
        units_per_row=config.row_tokens,
        row_tokens=config.row_tokens,
        exchanges=chat.validation,
        fingerprint=chat.train.fingerprint,
    )
    return task, chat.tokenizer


def _labelled(config: LabelledConfig) -> tuple[Task, Tokenizer]:
    labelled = open_labelled(config)
    task = Task(
        unit="texts",
        train=labelled.train,
        validation=labelled.validation,
        units_per_row=1,
        row_tokens=config.row_tokens,
        classes=labelled.classes,
        pad_token=padding_token(labelled.tokenizer),
        fingerprint=labelled.train.fingerprint,
    )
    return task, labelled.tokenizer


def _images(config: ImageConfig, seed: int) -> Task:
    images = open_images(config, seed=seed)
    return Task(
        unit="images",
        train=images.train,
        validation=images.validation,
        units_per_row=1,
        classes=tuple(str(number) for number in range(images.num_classes)),
        augmented=config.augment != "none",
        fingerprint=images.train.fingerprint,
    )


@torch.no_grad()
def require_separate_conversations(model: nn.Module, task: Task) -> None:
    """Raise `ConfigError` if `model` lets conversations that are packed into one row see each other.

    Found by running one row of two or more against each conversation alone: architectures that build their masks
    without position ids (OPT, BLOOM and Falcon in transformers 5.23) take such a row for one text.
    """
    rows = task.train
    if not isinstance(rows, ChatRows) or rows.layout != "packed":
        return
    packed = next((index for index in range(len(rows)) if len(rows.conversations(index)) > 1), None)
    if packed is None:
        return
    device = next(model.parameters()).device
    with evaluating(model):
        together = model(**to_device(rows.batch([packed]), device)).logits[0]  # (T, vocabulary)
        at = 0
        for ids in rows.conversations(packed):
            alone = model(input_ids=torch.from_numpy(ids)[None].to(device)).logits[0]
            if not torch.allclose(together[at : at + len(ids)], alone, rtol=1e-3, atol=1e-3 * float(alone.abs().max())):
                raise ConfigError(
                    f"{type(model).__name__} does not keep the conversations of a packed row apart (its masks do not "
                    "follow from position ids); set chat.layout = 'padded'"
                )
            at += len(ids)

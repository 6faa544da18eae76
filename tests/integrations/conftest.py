"""A model and rows small enough to be trained many times over in others' loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from ..run_events import Crash

TOKENS, VOCABULARY = 12, 40


def make_model(*, dropout: float = 0.0, layers: int = 4) -> GPT2LMHeadModel:
    """A GPT-2 of 4 layers with the same random weights each time."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_embd=16,
        n_head=2,
        n_positions=TOKENS,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


def make_rows(count: int = 32) -> list[dict[str, torch.Tensor]]:
    """Rows of counting tokens: something that can be learned."""
    starts = torch.arange(count)[:, None] * 7
    tokens = (starts + torch.arange(TOKENS)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


class CrashAt(TrainerCallback):
    """Stops the process, as far as the trainer can tell, after `step` steps."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Crash


@pytest.fixture
def model() -> Callable[..., GPT2LMHeadModel]:
    return make_model


@pytest.fixture
def rows() -> Callable[..., list[dict[str, Any]]]:
    return make_rows

"""The small GPT-2 of these tests, its batches, and the table of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

MakeModel = Callable[[], nn.Module]
MakeBatch = Callable[[int], dict[str, Tensor]]


@pytest.fixture(scope="session")
def gpt2() -> MakeModel:
    """Two layers, width 32, tied embedding, no dropout; the same weights each time."""
    sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

    def make() -> nn.Module:
        torch.manual_seed(1)
        return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))

    return make


@pytest.fixture(scope="session")
def batch() -> MakeBatch:
    """The batch of a step: a function of its number."""

    def make(step: int) -> dict[str, Tensor]:
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step))
        return {"input_ids": tokens, "labels": tokens}

    return make


def assert_nothing_moves(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """A backward pass through all of `model` leaves its weights as they are."""
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.requires_grad_(True)
    model(**batch).loss.backward()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


# Name -> class and keyword arguments. Rates are high, so that a difference shows after few steps.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW-amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "AdamW-fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True, "weight_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "Muon": (torch.optim.Muon, {"lr": 1e-2, "weight_decay": 0.1}),
}


@pytest.fixture(params=OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def optimizer_class(request: pytest.FixtureRequest) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Each row of the table in turn."""
    return request.param

"""A tied weight has the gradient that autograd gives it, in a third of the memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import blocktrain as bt
from blocktrain.chain.freezing import activate, release
from blocktrain.memory.fake import fake_copy
from blocktrain.memory.tracker import MemoryTracker
from blocktrain.modules.tied import share_gradients, unshare_gradients
from blocktrain.modules.wrap import wrappers_of

VOCABULARY, WIDTH = 64, 32
TABLE_BYTES = 4 * VOCABULARY * WIDTH
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


def gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": WIDTH, "n_head": 4, "n_positions": 64}
    settings: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes, **settings))


MODELS = {
    "gpt2": gpt2,
    "llama, padding": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, pad_token_id=3)),
    "llama, bf16": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)).bfloat16(),
    "gemma, which scales": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**LLAMA, head_dim=8, pad_token_id=0)),
}


@contextmanager
def joined(model: nn.Module) -> Iterator[None]:
    share_gradients(model)
    try:
        yield
    finally:
        unshare_gradients(model)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def gradients(model: nn.Module, tokens: Tensor, *, passes: int = 1) -> dict[str, Tensor]:
    model.zero_grad()
    for _ in range(passes):
        loss_of(model, tokens).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("tokens", [5, 48])  # fewer than the vocabulary, and more
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_bit_for_bit(name: str, tokens: int, passes: int) -> None:
    torch.manual_seed(0)
    model, ids = MODELS[name](), torch.randint(VOCABULARY, (2, tokens))
    ids[0, :2] = 3
    expected = gradients(model, ids, passes=passes)
    with joined(model):
        assert same(gradients(model, ids, passes=passes), expected)


def extra_peak(model: nn.Module, tokens: Tensor) -> int:
    """Peak bytes of a backward pass, less the gradients that it leaves."""
    model.zero_grad()
    with MemoryTracker() as tracker:
        loss = loss_of(model, tokens)
        tracker.reset_peak()
        loss.backward()
        return tracker.peak().bytes - sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("chunk", [None, 3])
def test_two_tables_of_gradients_are_saved(chunk: int | None) -> None:
    """Autograd alone makes the embedding's gradient and the sum in addition to the head's."""
    model, ids = gpt2(), torch.randint(VOCABULARY, (1, 6))
    with nullcontext() if chunk is None else bt.chunked_loss(model, chunk):
        plain = extra_peak(model, ids)
        with joined(model):
            saved = plain - extra_peak(model, ids)
    # The peak moves to another moment, so it falls by a little less than two tables.
    assert 2 * TABLE_BYTES - 16 * ids.numel() * WIDTH <= saved <= 2 * TABLE_BYTES


def test_gradients_are_shared_with_a_chunked_loss() -> None:
    model, ids = gpt2(), torch.randint(VOCABULARY, (2, 9))
    with bt.chunked_loss(model, 4):
        expected = gradients(model, ids)
    for inner, outer in ((joined(model), bt.chunked_loss(model, 4)), (bt.chunked_loss(model, 4), joined(model))):
        with outer, inner:
            assert same(gradients(model, ids), expected)


class WithoutHead(nn.Module):
    """Uses the head's weight in a loss of its own, as fused losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, called: bool = False) -> Tensor:
        hidden = self.embedding(ids)
        logits = self.head(hidden) if called else F.linear(hidden, self.head.weight)
        return F.cross_entropy(logits, ids)


def test_a_head_that_is_never_called_and_one_that_is_called_without_a_lookup() -> None:
    model, ids = WithoutHead(), torch.randint(VOCABULARY, (7,))

    def both() -> list[Tensor]:
        alone = model.head(torch.ones(1, WIDTH)).logsumexp(1).sum()
        losses = model(ids), alone, model(ids, called=True), model.embedding(ids).square().sum()
        return [torch.autograd.grad(loss, [model.embedding.weight])[0] for loss in losses]

    expected = both()
    with joined(model):
        assert all(map(torch.equal, both(), expected))


def test_a_gradient_can_be_differentiated_again() -> None:
    model, ids = WithoutHead().double(), torch.randint(VOCABULARY, (7,))

    def curvature() -> Tensor:
        (first,) = torch.autograd.grad(model(ids, called=True), [model.embedding.weight], create_graph=True)
        return torch.autograd.grad(first.square().sum(), [model.embedding.weight])[0]

    expected = curvature()
    with joined(model):
        torch.testing.assert_close(curvature(), expected)


def test_gradients_are_shared_only_while_the_owning_block_is_active() -> None:
    parts = bt.partition(gpt2(), num_blocks=3)

    def surrounded() -> set[str]:
        return {name for name, module in parts.model.named_modules() if wrappers_of(module)}

    for block in (parts[0], parts[0], parts[1], parts[0]):
        activate(parts, block)
        assert surrounded() == ({"transformer.wte", "lm_head"} if block is parts[0] else set())
    release(parts)
    assert surrounded() == set()
    assert not any("forward" in vars(module) for module in parts.model.modules())
    settings: dict[str, Any] = LLAMA | {"tie_word_embeddings": False}
    apart = bt.partition(hf.LlamaForCausalLM(hf.LlamaConfig(**settings)), num_blocks=2)
    activate(apart, apart[0])
    assert not any(wrappers_of(module) for module in apart.model.modules())


def test_a_copy_of_the_model_has_no_wrappers() -> None:
    """The copy is made between the lookup and the head, when the shared weight is set."""
    model, ids = WithoutHead(), torch.randint(VOCABULARY, (7,))
    expected = gradients_of(model, ids)
    with joined(model):
        model.embedding(ids)
        for twin in (copy.deepcopy(model), fake_copy(model).model):
            assert not any(isinstance(p, Tensor) and p.grad_fn is not None for p in twin.parameters())
        assert torch.equal(gradients_of(copy.deepcopy(model), ids), expected)


def gradients_of(model: WithoutHead, ids: Tensor) -> Tensor:
    return torch.autograd.grad(model(ids, called=True), [model.embedding.weight])[0]

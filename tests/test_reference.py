"""The fast path compared with Algorithm 1 written plainly: equal losses and weights, bit for bit (fp32, CPU)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import blocktrain as bt
from blocktrain import reference
from blocktrain.optim.factory import nothing
from blocktrain.schedule import Span

SWEEPS, STEPS = 2, 3


def gpt2() -> nn.Module:
    config = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)  # dropout 0.1: of the active block alone, drawn from the same generator


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=4,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
        )
    )


def resnet() -> nn.Module:
    return bt.resnet(8)


def batches(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        if isinstance(model, GPT2LMHeadModel | LlamaForCausalLM):
            tokens = torch.randint(0, 64, (2, 16), generator=generator)
            yield {"input_ids": tokens, "labels": tokens}
        else:
            images = torch.randn(4, 3, 32, 32, generator=generator)
            yield {"pixel_values": images, "labels": torch.randint(0, 10, (4,), generator=generator)}


def submodels_of(partition: bt.Partition) -> list[list[nn.Module]]:
    """The submodels of Algorithm 1, line 2, that correspond to the partition's blocks."""
    chain = [list(layer.modules.values()) for layer in partition.chain.layers]
    return reference.split_into_submodels(chain, [len(block.layers) for block in partition])


def train_fast(
    model: nn.Module, num_blocks: int, cls: type[torch.optim.Optimizer], span: Span = "block", **options: Any
) -> list[float]:
    partition = bt.partition(model, num_blocks=num_blocks)
    optimizer = bt.BlockOptimizer(partition, cls, undecayed=nothing, **options)
    schedule = bt.Cyclic(sweeps=SWEEPS, visit=bt.Duration.steps(STEPS), span=span)
    losses, source = [], batches(model)
    for visit in schedule.visits(partition):
        with optimizer.visit(visit.block):
            for _ in range(STEPS):
                loss = model(**next(source)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("num_blocks", "span"), [(1, "block"), (2, "block"), (3, "block"), (1, "suffix"), (3, "suffix")]
)
@pytest.mark.parametrize("make", [gpt2, llama, resnet])
@pytest.mark.parametrize(
    ("cls", "options"),
    [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})],
    ids=["SGD", "AdamW"],
)
def test_losses_and_weights_are_equal(make, num_blocks: int, span: Span, cls: type, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    fast = make()

    partition = bt.partition(plain, num_blocks=num_blocks)
    submodels = submodels_of(partition)
    torch.manual_seed(2)
    expected = reference.train(
        plain, submodels, batches(plain), lambda p: cls(p, **options), sweeps=SWEEPS, steps_per_visit=STEPS, span=span
    )
    torch.manual_seed(2)
    assert train_fast(fast, num_blocks, cls, span, **options) == expected
    for (name, a), (_, b) in zip(plain.state_dict().items(), fast.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_one_block_is_a_plain_pytorch_loop() -> None:
    torch.manual_seed(0)
    plain = gpt2()
    torch.manual_seed(0)
    fast = gpt2()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    torch.manual_seed(2)
    source, expected = batches(plain), []
    plain.train()
    for _ in range(SWEEPS * STEPS):
        loss = plain(**next(source)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
        if len(expected) == STEPS:  # the second visit starts with fresh moments
            optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    torch.manual_seed(2)
    assert train_fast(fast, 1, torch.optim.AdamW, lr=0.01) == expected
    for (name, a), (_, b) in zip(plain.state_dict().items(), fast.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_the_reference_can_tell_a_difference() -> None:
    """One step less in a visit and the weights differ: the comparison above is not empty."""
    torch.manual_seed(0)
    plain = gpt2()
    torch.manual_seed(0)
    fast = gpt2()
    partition = bt.partition(plain, num_blocks=2)
    submodels = submodels_of(partition)
    reference.train(plain, submodels, batches(plain), lambda p: torch.optim.SGD(p, lr=0.1), sweeps=1, steps_per_visit=2)
    reference.train(fast, submodels_of(bt.partition(fast, num_blocks=2)), batches(fast),
                    lambda p: torch.optim.SGD(p, lr=0.1), sweeps=1, steps_per_visit=1)  # fmt: skip
    assert not torch.equal(plain.get_parameter("lm_head.weight"), fast.get_parameter("lm_head.weight"))

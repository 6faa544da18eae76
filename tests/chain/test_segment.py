"""Blocks smaller than a layer: no scalar is left out or owned twice, and no block is larger than requested."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from blocktrain.chain.block import Partition
from blocktrain.chain.discovery import find_chain
from blocktrain.chain.partition import partition
from blocktrain.chain.segment import layer_segments, module_segments, segments_up_to
from blocktrain.errors import ConfigError, PartitionError


def llama(**settings) -> nn.Module:
    sizes = {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=2, **settings))


def gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 20, "n_embd": 8, "n_head": 2, "n_layer": 2, "n_positions": 4}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def owners(parts: Partition) -> dict[str, torch.Tensor]:
    """For each scalar of each parameter, how many blocks own it."""
    counts = {name: torch.zeros_like(p) for name, p in parts.whole.parameters.items()}
    for block in parts:
        for name in block.parameters:
            block.part(name, counts[name]).add_(1)
    return counts


def test_a_layer_comes_apart_into_modules_and_a_matrix_into_rows() -> None:
    found = segments_up_to(find_chain(llama()), 600)
    assert [(segment.name, segment.size) for segment in found] == [
        ("model.embed_tokens.weight[0:50]", 400),
        ("model.embed_tokens.weight[50:100]", 400),
        ("model.layers.0.self_attn", 256),
        ("model.layers.0.(mlp+input_layernorm.weight+post_attention_layernorm.weight)", 592),
        ("model.layers.1.self_attn", 256),
        ("model.layers.1.(mlp+input_layernorm.weight+post_attention_layernorm.weight)", 592),
        ("model.norm.weight", 8),
        ("lm_head.weight[0:50]", 400),
        ("lm_head.weight[50:100]", 400),
    ]


@pytest.mark.parametrize("largest", [24, 31, 100, 256, 600, 850, 3000, 10**9])
@pytest.mark.parametrize("tied", [True, False])
def test_every_scalar_is_in_exactly_one_block(largest: int, tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    parts = partition(model, largest=largest)
    assert all((count == 1).all() for count in owners(parts).values())
    assert parts.num_parameters == sum(p.numel() for p in model.parameters())
    assert all(block.num_parameters <= largest for block in parts)


def test_there_are_as_few_blocks_as_the_limit_allows() -> None:
    model = llama()
    assert len(partition(model, largest=3304)) == 1  # all of it
    assert len(partition(model, largest=1656)) == 2
    assert len(partition(model, largest=1655)) == 3


def test_layers_that_are_small_enough_stay_whole() -> None:
    chain = find_chain(llama())
    names = [segment.name for segment in layer_segments(chain)]
    assert [segment.name for segment in segments_up_to(chain, 900)] == names


def test_modules_come_apart_with_the_norms_beside_them() -> None:
    found = [segment.name for segment in module_segments(find_chain(gpt2()))]
    layer = ["ln_1+attn.c_attn", "attn.c_proj", "ln_2+mlp.c_fc", "mlp.c_proj"]
    names = [f"transformer.h.{index}.({name})" if "+" in name else f"transformer.h.{index}.{name}"
             for index in range(2) for name in layer]  # fmt: skip
    assert found == [
        "transformer.wte",
        "transformer.wpe",
        *names,
        "head",
    ]  # the head is a norm, and the embedding's matrix
    last = module_segments(find_chain(llama()))[-4:]
    assert [segment.name for segment in last] == [
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.(mlp.down_proj+input_layernorm+post_attention_layernorm)",
        "head",
    ]


@pytest.mark.parametrize("model", [gpt2, llama])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_number_of_blocks_of_modules_is_more_even(model, count: int) -> None:
    """Two layers and an embedding do not divide by three or five."""
    parts, coarse = (partition(model(), min(count, 4), pieces=pieces) for pieces in ("modules", "layers"))
    assert len(parts) == len(coarse)
    assert all((owned == 1).all() for owned in owners(parts).values())
    assert max(block.num_parameters for block in parts) <= max(block.num_parameters for block in coarse)
    if count == 3:
        assert max(block.num_parameters for block in parts) < max(block.num_parameters for block in coarse)


def test_what_does_not_go_with_modules() -> None:
    refused: list[dict[str, Any]] = [
        {"largest": 100},
        {"num_blocks": 2, "stages": 2},
        {"num_blocks": 2, "balance": "flops"},
    ]
    for arguments in refused:
        with pytest.raises(ConfigError, match="pieces = 'modules' evens out the parameters of a number of"):
            partition(llama(), pieces="modules", **arguments)
    with pytest.raises(ConfigError, match="'module' is unknown; did you mean 'modules'"):
        partition(llama(), 2, pieces="module")  # pyright: ignore[reportArgumentType]


def test_a_limit_below_one_row_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"one row of 'model.embed_tokens.weight' has 8 parameters"):
        partition(llama(), largest=7)


def test_one_way_to_cut_at_a_time() -> None:
    with pytest.raises(ConfigError, match="exactly one of num_blocks, largest and patterns"):
        partition(llama(), 3, largest=100)

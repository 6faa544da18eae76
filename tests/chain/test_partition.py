"""Every parameter is in exactly one block, whatever the model and the way it is cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from blocktrain.chain.block import Partition
from blocktrain.chain.cost import layer_costs
from blocktrain.chain.discovery import find_chain
from blocktrain.chain.partition import partition, partition_by_config
from blocktrain.chain.partition_config import PartitionConfig
from blocktrain.chain.resnet import resnet
from blocktrain.errors import ConfigError, PartitionError


def gpt2(layers: int = 2) -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": 16,
        "n_positions": 8,
        "n_embd": 8,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=layers, **sizes))


def llama(**settings: Any) -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=3,
            num_attention_heads=2,
            **settings,
        )
    )


def mlp(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(4, 4), nn.ReLU())))


MODELS = {
    "gpt2, tied": gpt2,
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "sequential": mlp,
    "resnet": lambda: resnet(8),
}


def names(parts: Partition) -> list[list[str]]:
    return [[layer.name for layer in block.layers] for block in parts]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_every_parameter_is_in_exactly_one_block(model):
    model = model()
    layers = len(find_chain(model).layers)
    for num_blocks in range(1, layers + 1):
        parts = partition(model, num_blocks=num_blocks)
        assert len(parts) == num_blocks
        placed = [id(parameter) for block in parts for parameter in block.parameters.values()]
        assert sorted(placed) == sorted(id(parameter) for parameter in model.parameters())
        for block in parts:
            for name, parameter in block.parameters.items():
                assert model.get_parameter(name) is parameter
        assert [name for block in names(parts) for name in block] == [layer.name for layer in parts.chain.layers]


def test_a_tied_weight_is_owned_by_the_first_block_that_uses_it():
    model = gpt2()
    parts = partition(model, num_blocks=3)
    assert "transformer.wte.weight" in parts[0].parameters
    head = model.get_parameter("lm_head.weight")
    assert all(head is not parameter for parameter in parts[2].parameters.values())
    assert parts.num_parameters == sum(p.numel() for p in model.parameters())


def test_a_block_that_owns_nothing_is_refused():
    shared = nn.Linear(2, 2)
    with pytest.raises(PartitionError, match=r"block 1 \(1\) owns no parameters: use fewer blocks"):
        partition(nn.Sequential(shared, shared), num_blocks=2)


def test_too_few_and_too_many_blocks():
    with pytest.raises(ConfigError, match="count must be at least 1, not 0"):
        partition(mlp(), num_blocks=0)
    with pytest.raises(PartitionError, match="5 blocks need at least 5 layers; the model has 4: use fewer blocks"):
        partition(mlp(), num_blocks=5)


def test_number_or_patterns_but_not_both():
    for given in ({}, {"num_blocks": 2, "patterns": [["*"]]}):
        with pytest.raises(ConfigError, match="give exactly one of num_blocks, largest and patterns"):
            partition(mlp(), **given)


def test_layers_from_a_configuration():
    """What `[blocks] layers` of a run says, for a model whose layers are not found automatically."""
    config = PartitionConfig(count=2, layers={"low": ["0", "1", "2", "3"], "high": ["4", "5", "6", "7"]})
    assert names(partition_by_config(mlp(), config)) == [["low"], ["high"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 0}, "stages = 0 must be at least 1"),
        ({"largest": 100, "patterns": [["*"]]}, "give largest or patterns, not both"),
        ({"largest": 100, "stages": 2}, "stages = 2 cuts the model into a number of blocks"),
        ({"patterns": [["*"]], "stages": 2}, "stages = 2 cuts the model into a number of blocks"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        PartitionConfig(**options)


# -- by patterns ------------------------------------------------------------------------------------------------------


def test_a_name_is_matched_whole_so_layer_1_is_not_layer_10():
    """BAdam found blocks by substring: `layers.1` took `layers.10` and `layers.11` along."""
    model = gpt2(layers=12)
    first = ["embedding", "transformer.h.0", "transformer.h.1"]
    parts = partition(model, patterns=[first, ["transformer.h.*"], ["head"]])
    assert names(parts) == [first, [f"transformer.h.{index}" for index in range(2, 12)], ["head"]]
    assert not any("h.10" in name or "h.11" in name for name in parts[0].parameters)


def test_the_first_block_that_names_a_layer_has_it():
    parts = partition(gpt2(layers=12), patterns=[["embedding", "transformer.h.[0-3]"], ["transformer.h.*", "head"]])
    assert [len(block.layers) for block in parts] == [5, 9]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            [["0", "2"], ["4", "nothing*"], ["6"]],
            r"pattern 'nothing\*' of block 1 matches no layer; layers: 0, 2, 4, 6",
        ),
        ([["0", "4"], ["2", "6"]], "block 0 is not contiguous: 0, 4"),
        ([["0", "2"], ["4"]], "no pattern matches layer '6'; every layer must be in a block"),
        ([["0", "2", "4", "6"], ["6"]], "block 1 is empty: earlier patterns already took all its layers"),
        ([["4", "6"], ["0", "2"]], "the patterns' blocks are not in the order of the model's layers; reorder them"),
        ([], "no pattern matches layer '0'"),
    ],
)
def test_patterns_that_give_no_partition(patterns: list[list[str]], message: str):
    layers = {name: [name] for name in ("0", "2", "4", "6")}
    with pytest.raises(PartitionError, match=message):
        partition(mlp(), patterns=patterns, layers=layers)


# -- balance ----------------------------------------------------------------------------------------------------------


def test_blocks_balanced_by_parameters():
    model = nn.Sequential(nn.Linear(9, 10), *(nn.Linear(4, 4) for _ in range(6)))  # 100, then 20 each
    assert [len(block.layers) for block in partition(model, num_blocks=2)] == [1, 6]
    assert [len(block.layers) for block in partition(model, num_blocks=3)] == [1, 3, 3]


def largest(costs: list[int], parts: Partition) -> int:
    price = dict(zip((layer.name for layer in parts.chain.layers), costs, strict=True))
    return max(sum(price[layer.name] for layer in block.layers) for block in parts)


def test_blocks_balanced_by_flops():
    """Early layers of a residual network are dear to compute and hold few parameters."""
    model, batch = resnet(14), {"pixel_values": torch.zeros(2, 3, 32, 32)}
    flops = [cost.forward_flops for cost in layer_costs(find_chain(model), batch)]
    by_flops = partition(model, num_blocks=2, balance="flops", batch=batch)
    by_parameters = partition(model, num_blocks=2)
    best = min(max(sum(flops[:cut]), sum(flops[cut:])) for cut, _ in pairwise(range(1, len(flops) + 1)))
    assert largest(flops, by_flops) == best < largest(flops, by_parameters)


def test_flops_are_counted_of_a_batch():
    with pytest.raises(ConfigError, match="balance = 'flops' counts the FLOPs of a forward pass: give batch="):
        partition(gpt2(), num_blocks=2, balance="flops")


def test_an_unknown_balance():
    with pytest.raises(ConfigError, match="balance 'parameter' is unknown; did you mean 'parameters'"):
        partition(mlp(), num_blocks=2, balance="parameter")  # pyright: ignore[reportArgumentType]

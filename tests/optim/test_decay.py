"""Weight decay has the value that the user gave, on the parameters that it is meant for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from blocktrain.chain.partition import partition
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.factory import norms_and_biases, nothing, undecayed_ids


def undecayed_names(model: nn.Module) -> set[str]:
    chosen = undecayed_ids(model, norms_and_biases)
    return {name for name, p in model.named_parameters() if id(p) in chosen}


def llama() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=2, attention_bias=True, **sizes))


def test_norms_of_hugging_face_are_recognized_by_their_class():
    """BAdam tested whether a tensor is a LayerNorm module, which is never true: it decayed every norm."""
    layers = {f"model.layers.{i}" for i in (0, 1)}
    norms = {f"{layer}.{which}_layernorm.weight" for layer in layers for which in ("input", "post_attention")}
    biases = {f"{layer}.self_attn.{which}_proj.bias" for layer in layers for which in "qkvo"}
    assert undecayed_names(llama()) == norms | biases | {"model.norm.weight"}


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.InstanceNorm1d(4, affine=True)],
    ids=lambda norm: type(norm).__name__,
)
def test_norms_of_pytorch_are_not_decayed(norm: nn.Module):
    names = {name for name, _ in norm.named_parameters()}
    assert undecayed_names(norm) == names > set()


def test_the_name_of_a_parameter_decides_nothing():
    """A linear layer called "norm" is decayed; a norm under any name is not."""
    model = nn.ModuleDict({"norm": nn.Linear(2, 2), "scale": nn.LayerNorm(2), "bias": nn.Embedding(2, 2)})
    assert undecayed_names(model) == {"norm.bias", "scale.weight", "scale.bias"}


def test_biases_with_other_names_in_pytorch():
    model = nn.ModuleList([nn.MultiheadAttention(4, 2, add_bias_kv=True), nn.LSTM(2, 2)])
    expected = {"0.in_proj_bias", "0.bias_k", "0.bias_v", "0.out_proj.bias", "1.bias_ih_l0", "1.bias_hh_l0"}
    assert undecayed_names(model) == expected


def test_a_tied_weight_is_decayed():
    model = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model.get_submodule("2").weight = model.get_submodule("0").weight
    assert undecayed_names(model) == {"1.weight", "1.bias", "2.bias"}


def decay_by_name(optimizer: BlockOptimizer) -> dict[str, float]:
    found = {}
    for block in optimizer.partition:
        with optimizer.visit(block):
            names = {id(p): name for name, p in block.parameters.items()}
            for group in optimizer.param_groups:
                found |= {names[id(p)]: group["weight_decay"] for p in group["params"]}
    return found


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_value_is_the_one_that_the_user_gave(decay: float):
    """BAdam: 0.0 and 0.1 both became 0.01."""
    model = llama()
    optimizer = BlockOptimizer(partition(model, num_blocks=3), torch.optim.AdamW, lr=1e-3, weight_decay=decay)
    found, spared = decay_by_name(optimizer), undecayed_names(model)
    assert found == {name: 0.0 if name in spared else decay for name, _ in model.named_parameters()}


def test_without_a_value_the_class_keeps_its_own_default():
    optimizer = BlockOptimizer(partition(llama(), num_blocks=3), torch.optim.AdamW, lr=1e-3)
    assert set(decay_by_name(optimizer).values()) == {0.0, 0.01}


def test_everything_can_be_decayed():
    parts = partition(llama(), num_blocks=3)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=1e-3, weight_decay=0.1, undecayed=nothing)
    assert set(decay_by_name(optimizer).values()) == {0.1}


def test_a_class_without_weight_decay_gets_one_group():
    parts = partition(llama(), num_blocks=3)
    optimizer = BlockOptimizer(parts, torch.optim.Rprop, lr=1e-3)
    with optimizer.visit(parts[0]):
        (group,) = optimizer.param_groups
        assert len(group["params"]) == len(parts[0].parameters)


def test_decay_moves_the_decayed_weights_and_no_others():
    """With zero gradients AdamW only decays: w (1 - lr * decay)."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    parts = partition(model, num_blocks=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=0.5, weight_decay=0.5)
    with optimizer.visit(parts[0]):
        (model(torch.ones(2, 4)) * 0).sum().backward()
        optimizer.step()
    after = {name: value * 0.75 if name == "0.weight" else value for name, value in before.items()}
    assert all(torch.equal(p, after[name]) for name, p in model.named_parameters())

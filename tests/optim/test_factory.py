"""Which optimizer class a configuration names, and which of its parameters decay."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf
from torch import nn

import blocktrain as bt
from blocktrain.chain.partition import partition
from blocktrain.errors import ConfigError, Interrupted
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.factory import find_optimizer_class, norms_and_biases, nothing, require_options, undecayed_ids
from blocktrain.records.log import read_events
from blocktrain.records.run_records import Record, Step

# -- classes -----------------------------------------------------------------------------------------------------------


class CountedAdamW(torch.optim.AdamW):
    """AdamW that counts its steps: an optimizer class of one's own."""

    taken: ClassVar[int] = 0

    def step(self, closure=None):
        CountedAdamW.taken += 1
        return super().step(closure)


NOT_A_CLASS = CountedAdamW([torch.zeros(1)])


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in read_events(folder / "events.jsonl") if event["kind"] == "step"]


def test_a_run_trains_with_a_class_of_ones_own(tiny, tmp_path: Path) -> None:
    """The same losses as with the class that it derives from, and each step is its own."""
    bt.run(tiny("optimizer.name=AdamW"), tmp_path / "torch")
    CountedAdamW.taken = 0
    bt.run(tiny(f"optimizer.name={__name__}:CountedAdamW"), tmp_path / "own")
    assert losses(tmp_path / "own") == losses(tmp_path / "torch")
    assert len(losses(tmp_path / "own")) == 12
    assert CountedAdamW.taken >= 12


def test_a_run_with_a_class_of_ones_own_resumes(tiny, tmp_path: Path) -> None:
    """The path is stored in the run's configuration, and the class is imported again."""

    def stop(record: Record) -> None:
        if isinstance(record, Step) and record.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        bt.run(tiny(f"optimizer.name={__name__}:CountedAdamW"), tmp_path / "run", listeners=[stop])
    CountedAdamW.taken = 0
    bt.resume(tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 12
    assert CountedAdamW.taken >= 6


def test_names_of_optimizer_classes() -> None:
    assert find_optimizer_class("Muon") is torch.optim.Muon
    for name in (f"{__name__}:CountedAdamW", f"{__name__}.CountedAdamW"):
        assert find_optimizer_class(name) is CountedAdamW


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "AdamV": r"'AdamV' is neither a class of torch\.optim.*'package\.module:Class'; did you mean 'Adam",
        "LBFGS": r"'LBFGS' is neither a class of torch\.optim that can train a block",
        "Optimizer": r"'Optimizer' is neither a class of torch\.optim that can train a block",
        "torch.optim.AdamW": r"without its path, 'AdamW'",
        "torch.optim:LBFGS": r"'torch\.optim:LBFGS' is neither a class of torch\.optim that can train a block",
        "no_such_package:Lion": r"module 'no_such_package' cannot be imported \(No module named .* add its folder to",
        f"{__name__}:CountedAdam": r"'.*:CountedAdam' is not a subclass of .*; did you mean 'CountedAdamW'",
        f"{__name__}:NOT_A_CLASS": r"NOT_A_CLASS' is not a subclass of torch\.optim\.Optimizer",
        "json:JSONDecoder": r"is not a subclass of torch\.optim\.Optimizer in 'json'; it defines none",
        "..": r"'\.' is not the name of a module",
        "": r"'' is neither a class of torch\.optim",
    }.items(),
)
def test_a_wrong_name_is_refused_with_the_way_out(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_optimizer_class(name)


def test_a_class_that_refuses_the_settings_is_named(tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r":CountedAdamW has no 'beta'; did you mean 'betas'"):
        bt.run(tiny(f"optimizer.name={__name__}:CountedAdamW", "optimizer.options.beta=3"), tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": [0.9]}, r"options\.betas must be a list of 2 numbers, such as \[0\.9, 0\.999\], not \[0\.9\]"),
        ({"betas": 3}, r"options\.betas must be a list of 2 numbers, such as \[0\.9, 0\.999\], not 3"),
        ({"eps": "small"}, r"options\.eps must be a number, not 'small'"),
        ({"eps": True}, r"options\.eps must be a number, not true"),
        ({"differentiable": True}, "refuses these settings"),
        ({"capturable": True}, "refuses these settings: If capturable=True"),
        ({"fused": "yes"}, "optimizer.options.fused must be true or false, not 'yes'"),
    ],
)
def test_options_that_fail_at_the_first_step_are_refused(options: dict[str, Any], message: str) -> None:
    """Such options ended in a traceback after the run folder was written; any text counted as true."""
    with pytest.raises(ConfigError, match=message):
        require_options("AdamW", torch.optim.AdamW, options, torch.device("cpu"))


# -- weight decay ------------------------------------------------------------------------------------------------------


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

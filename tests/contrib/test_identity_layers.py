"""Layers that begin as the identity can be left out: losses and gradients are equal, and what is zero learns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import blocktrain as bt
from blocktrain.chain.chain import Chain
from blocktrain.contrib.identity_layers import IdentityLayers
from blocktrain.errors import ConfigError
from blocktrain.memory.flops import count_flops

from ..chain.test_huggingface import build

DENSE = [
    "gpt2",
    "gpt_neox",
    "opt",
    "bloom",
    "falcon",
    "phi",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "stablelm",
]


def find_chain(name: str) -> Chain:
    return bt.partition(build(name, tied=True), num_blocks=3).chain


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(3, 96, (2, 12))
    return {"input_ids": ids, "labels": ids}


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", DENSE)
def test_left_out_or_not_a_step_is_the_same(name: str) -> None:
    chain, batch = find_chain(name), tokens()
    growth, outside = IdentityLayers(chain, batch), chain.layers[2:-1]
    for layer in outside:
        for _, parameter in layer.named_parameters():
            parameter.requires_grad_(False)
    loss, gradients = step(chain.model, batch)
    with growth.without(outside):
        without, others = step(chain.model, batch)
    assert torch.equal(loss, without)
    assert any(gradient is not None for gradient in gradients)
    for gradient, other in zip(gradients, others, strict=True):
        assert (gradient is None and other is None) or torch.equal(gradient, other)  # pyright: ignore[reportArgumentType]


def test_what_is_left_out_costs_nothing_and_is_run_again_afterwards() -> None:
    chain, batch = find_chain("llama"), tokens()
    growth = IdentityLayers(chain, batch)

    def cost() -> int:
        return count_flops(lambda: chain.model(**batch))

    whole = cost()
    with growth.without(chain.layers[1:-1]):
        head = cost()
    with growth.without(chain.layers[2:-1]):
        assert cost() - head == (whole - head) // 3  # one layer of three
    assert cost() == whole


def test_only_the_last_matrix_of_each_branch_is_zero() -> None:
    chain = find_chain("gpt2")
    IdentityLayers(chain, tokens())
    zero = {name for name, parameter in chain.model.named_parameters() if parameter.dim() == 2 and not parameter.any()}
    assert zero == {f"transformer.h.{i}.{part}.c_proj.weight" for i in range(3) for part in ("attn", "mlp")}


def test_every_weight_learns_after_two_steps() -> None:
    """In the first one the matrices before a zero have no gradient."""
    chain, batch = find_chain("llama"), tokens()
    IdentityLayers(chain, batch)
    before = {name: parameter.detach().clone() for name, parameter in chain.model.named_parameters()}
    optimizer = torch.optim.SGD(chain.model.parameters(), lr=1.0)
    for _ in range(2):
        step(chain.model, batch)
        optimizer.step()
    assert not [name for name, parameter in chain.model.named_parameters() if torch.equal(parameter, before[name])]


@pytest.mark.parametrize("name", ["opt-350m", "mixtral", "deepseek_v3"])
def test_layers_that_cannot_begin_so_are_refused(name: str) -> None:
    """Norms behind the sum; the last matrices of experts, which are no modules."""
    with pytest.raises(ConfigError, match=r"layer 'model\..*layers\.\d' of .* is not the identity .*leave out"):
        IdentityLayers(find_chain(name), tokens())


def test_a_branch_that_would_never_learn_is_refused() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(self.a(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), Layer(), nn.Linear(8, 8)])

        def forward(self, x: Tensor):
            for layer in self.layers:
                x = layer(x)
            return CausalLMOutput(logits=x)

    chain = Chain.of_modules(Model(), {str(i): [f"layers.{i}"] for i in range(3)})
    with pytest.raises(ConfigError, match=r"would never learn; leave out model\.zero_residuals"):
        IdentityLayers(chain, {"x": torch.randn(2, 8)})

"""The closed form of a step's cost against counted FLOPs, and against figures measured before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

from blocktrain.chain.chain import Chain
from blocktrain.chain.cost import LayerCost, layer_costs, theoretical_step_flops
from blocktrain.chain.discovery import find_chain
from blocktrain.chain.resnet import resnet
from blocktrain.errors import PartitionError
from blocktrain.memory.flops import StepCounter

B, T = 1, 256


def gpt2(layers: int, width: int, *, tied: bool, vocab: int = 8192) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=vocab, n_embd=width, n_layer=layers, n_head=8, n_positions=T, tie_word_embeddings=tied
    )
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config).eval()


def llama_config(layers: int, width: int, *, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": 8192,
        "hidden_size": width,
        "intermediate_size": 8 * width // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "tie_word_embeddings": tied,
    }


def llama(layers: int, width: int, *, tied: bool) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**llama_config(layers, width, tied=tied)))


def tokens() -> dict[str, Any]:
    ids = torch.zeros(B, T, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def images() -> dict[str, Any]:
    return {"pixel_values": torch.zeros(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.long)}


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def thirds(chain: Chain) -> list[range]:
    """Blocks of equally many transformer layers; the embedding joins the first, the head the last."""
    inner = (len(chain.layers) - 2) // 3
    return [range(0, 1 + inner), range(1 + inner, 1 + 2 * inner), range(1 + 2 * inner, len(chain.layers))]


def owned_names(chain: Chain, layers: range) -> list[str]:
    return [name for index in layers for name in chain.owned[index]]


LANGUAGE_MODELS = {
    "gpt2 tied": lambda: gpt2(6, 512, tied=True),
    "gpt2 untied": lambda: gpt2(6, 512, tied=False),
    "gpt2 small, wide vocabulary": lambda: gpt2(6, 192, tied=True, vocab=50257),
    "llama tied": lambda: llama(6, 192, tied=True),
    "llama untied": lambda: llama(6, 512, tied=False),
}


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_closed_form_within_two_percent_of_counted_flops(name: str):
    model = on_meta(LANGUAGE_MODELS[name])
    chain, counter = find_chain(model), StepCounter(model, tokens())
    costs = layer_costs(chain, tokens())
    theory = [theoretical_step_flops(costs, block) for block in thirds(chain)]
    counted = [counter.training(owned_names(chain, block)) for block in thirds(chain)]
    assert theory == pytest.approx(counted, rel=0.02)
    assert sum(theory) == pytest.approx(sum(counted), rel=0.02)
    assert theoretical_step_flops(costs) == pytest.approx(counter.full(), rel=0.02)
    # A suffix visit trains the block and everything above it.
    above = range(thirds(chain)[1].start, len(costs))
    assert theoretical_step_flops(costs, above) == pytest.approx(counter.training(owned_names(chain, above)), rel=0.02)


@pytest.mark.parametrize("build", [gpt2, llama])
def test_shares_of_a_full_step_as_once_measured(build: Callable[..., nn.Module]):
    """12 layers, width 512, vocabulary 8k, 256 tokens, three blocks; counted on a CPU with PyTorch 2.13."""
    chain = find_chain(on_meta(lambda: build(12, 512, tied=False)))
    costs = layer_costs(chain, tokens())
    full, blocks = theoretical_step_flops(costs), thirds(chain)
    uncached = [theoretical_step_flops(costs, block) / full for block in blocks]
    cached = [theoretical_step_flops(costs, block, first_layer=block.start) / full for block in blocks]
    assert [*uncached, sum(uncached) / 3] == pytest.approx([0.785, 0.674, 0.594, 0.685], abs=0.01)
    assert [*cached, sum(cached) / 3] == pytest.approx([0.785, 0.575, 0.395, 0.585], abs=0.01)


@pytest.mark.parametrize(("blocks", "layers_each"), [(3, 2), (4, 3), (1, 5)])
def test_equal_layers_without_attention_give_the_plain_theory(blocks: int, layers_each: int):
    """Block k of M: (2M - k + 1) / (3M) of a full step, (2(M - k) + 1) / (3M) behind a prefix cache."""
    free = LayerCost(
        name="embedding",
        parameters=1,
        forward_flops_weights=0,
        forward_flops_attention=0,
        backward_flops_attention=0,
        owner=0,
    )
    costs = [free]
    for index in range(blocks * layers_each):
        costs.append(
            LayerCost(
                name=f"{index}",
                parameters=1,
                forward_flops_weights=60,
                forward_flops_attention=0,
                backward_flops_attention=0,
                owner=index + 1,
            )
        )
    full = theoretical_step_flops(costs)
    for k in range(blocks):
        active = range(1 + k * layers_each, 1 + (k + 1) * layers_each)
        uncached = theoretical_step_flops(costs, active)
        cached = theoretical_step_flops(costs, active, first_layer=active.start)
        assert uncached * 3 * blocks == full * (2 * blocks - k + 1)
        assert cached * 3 * blocks == full * (2 * (blocks - k) + 1)


def test_costs_by_layer_by_hand():
    """GPT-2, width d: a layer multiplies by 12 d^2 weights and attends with 4 B T^2 d; the head by V d."""
    layers, d, vocab = 3, 64, 512
    chain = find_chain(on_meta(lambda: gpt2(layers, d, tied=True, vocab=vocab)))
    costs = layer_costs(chain, tokens())
    weights = [0, *[2 * B * T * 12 * d * d] * layers, 2 * B * T * vocab * d]
    attention = [0, *[4 * B * T * T * d] * layers, 0]
    assert [cost.forward_flops_weights for cost in costs] == weights
    assert [cost.forward_flops_attention for cost in costs] == attention
    assert [cost.backward_flops_attention for cost in costs] == [5 * flops // 2 for flops in attention]
    assert [cost.forward_flops for cost in costs] == [w + a for w, a in zip(weights, attention, strict=True)]
    assert [cost.name for cost in costs] == [layer.name for layer in chain.layers]
    assert sum(cost.parameters for cost in costs) == sum(p.numel() for p in chain.model.parameters())
    assert [cost.owner for cost in costs] == [0, 1, 2, 3, 0]  # the tied head is the embedding's


def test_matrix_product_attention_pays_two_forwards_in_the_backward_pass():
    model = gpt2(2, 64, tied=True, vocab=64)
    model.set_attn_implementation("eager")
    costs, full = layer_costs(find_chain(model), tokens()), StepCounter(model, tokens()).full()
    assert costs[1].forward_flops_attention == 4 * B * T * T * 64
    assert costs[1].backward_flops_attention == 2 * costs[1].forward_flops_attention
    assert theoretical_step_flops(costs) == full


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (resnet(20), images()),
        (Olmo2ForCausalLM(Olmo2Config(**llama_config(4, 64, tied=False), pad_token_id=0)), tokens()),
    ],
    ids=["resnet", "olmo2"],
)
def test_without_a_norm_first_the_closed_form_counts_one_gradient_too_many(model: nn.Module, batch: dict[str, Any]):
    """The documented limit: the first active layer's first matrix product needs no gradient of its input."""
    chain, counter, costs = find_chain(model), StepCounter(model, batch), layer_costs(find_chain(model), batch)
    assert sum(cost.forward_flops for cost in costs) == counter.forward()
    assert theoretical_step_flops(costs) == counter.full()
    block = thirds(chain)[1]
    counted, theory = counter.training(owned_names(chain, block)), theoretical_step_flops(costs, block)
    assert counted < theory < 1.1 * counted


@pytest.mark.parametrize("active", [[], [5], [-1]])
def test_active_layers_must_exist(active: list[int]):
    costs = layer_costs(find_chain(on_meta(lambda: gpt2(3, 64, tied=True, vocab=64))), tokens())
    with pytest.raises(PartitionError, match=r"active layers .* must be some of 0 to 4"):
        theoretical_step_flops(costs, active)


def test_a_forward_pass_cannot_start_above_the_active_layers():
    costs = layer_costs(find_chain(on_meta(lambda: gpt2(3, 64, tied=True, vocab=64))), tokens())
    with pytest.raises(PartitionError, match="cannot start at layer 3: layer 2 is active"):
        theoretical_step_flops(costs, [2, 3], first_layer=3)


def test_a_layer_of_containers_is_entered_through_its_children():
    """A layer may name a module that is never called itself, only its children."""

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.ModuleList([nn.Linear(4, 8)]), nn.ModuleList([nn.Linear(8, 2)])

        def forward(self, x):
            return self.high[0](self.low[0](x))

    chain = find_chain(Split(), layers={"low": ["low"], "high": ["high"]})
    costs = layer_costs(chain, {"x": torch.zeros(3, 4)})
    assert [cost.forward_flops for cost in costs] == [2 * 3 * 4 * 8, 2 * 3 * 8 * 2]

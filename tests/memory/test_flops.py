"""Counts on a fake copy are the counts on the model; frozen prefixes save nothing."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from blocktrain.chain.discovery import find_chain
from blocktrain.chain.resnet import resnet
from blocktrain.errors import ConfigError
from blocktrain.memory.fake import fake_copy
from blocktrain.memory.flops import UNCOUNTED, FlopCounter, StepCounter, count_flops, saved_bytes

TINY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA: dict[str, Any] = TINY | {"intermediate_size": 48, "num_key_value_heads": 2}
B, T = 2, 16


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**TINY, n_positions=T, bos_token_id=0, eos_token_id=0))


def tokens() -> dict[str, Any]:
    ids = torch.randint(0, 64, (B, T))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(B, 3, 32, 32), "labels": torch.zeros(B, dtype=torch.long)}


def experts(implementation: str) -> MixtralForCausalLM:
    model = MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4))
    model.set_experts_implementation(implementation)
    return model


MODELS = {
    "gpt2": (gpt2, tokens),
    "gpt2 without dropout": (lambda: gpt2().eval(), tokens),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)), tokens),
    "llama with padding": (
        lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
        lambda: tokens() | {"attention_mask": torch.ones(B, T, dtype=torch.long)},
    ),
    "mixtral grouped": (lambda: experts("grouped_mm"), tokens),
    "mixtral eager": (lambda: experts("eager"), tokens),
    "resnet": (lambda: resnet(8), images),
}


def only(model: nn.Module, names: Collection[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def step(model: nn.Module, batch: dict[str, Any]) -> None:
    model(**batch).loss.backward()


@pytest.mark.parametrize("name", MODELS)
def test_counts_on_a_fake_copy_equal_counts_on_the_model(name: str):
    build, batch_of = MODELS[name]
    model, batch = build(), batch_of()
    counter = StepCounter(model, batch)
    owned = find_chain(model).owned
    choices = [set(dict(model.named_parameters())), set(owned[0]), set(owned[2]) | set(owned[4])]
    for names in choices:
        only(model, names)
        assert counter.training(names) == count_flops(lambda: step(model, batch))
    only(model, choices[0])
    assert counter.forward() == count_flops(lambda: model(**batch))


def test_attention_on_the_cpu_is_counted():
    """FlopCounterMode alone gives 0: (B, H, T, D) attention is 4 B H T^2 D forward and 2.5 times that backward."""
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    forward = 4 * 2 * 4 * 16 * 16 * 8
    assert count_flops(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)) == forward
    both = count_flops(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward())
    assert both == forward + forward * 5 // 2


def test_checkpointing_pays_for_its_second_forward():
    """The layers' forward once more; by default without each layer's last product, which nothing needs again."""
    model, batch = LlamaForCausalLM(LlamaConfig(**LLAMA)).train(), tokens()
    counter = StepCounter(model, batch)
    plain, layers = counter.full(), counter.forward() - 2 * B * T * 64 * 32  # all but the head
    for layer in cast(Any, model.model.layers):
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    last_products = 3 * 2 * B * T * 48 * 32
    for early_stop, recomputed in ((False, layers), (True, layers - last_products)):
        with set_checkpoint_early_stop(early_stop):
            assert StepCounter(model, batch).full() - plain == recomputed
            assert count_flops(lambda: step(model, batch)) - plain == recomputed


def test_a_tied_parameter_may_go_by_either_name_and_an_unknown_one_is_refused():
    counter = StepCounter(gpt2(), tokens())
    assert counter.training(["lm_head.weight"]) == counter.training(["transformer.wte.weight"])
    with pytest.raises(ConfigError, match=r"'transformer\.wte\.wait'; did you mean 'transformer\.wte\.weight'"):
        counter.training(["transformer.wte.wait"])


def test_another_loss_and_a_plain_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    counter = StepCounter(model, {"input": torch.zeros(3, 4)}, loss=lambda output: output.square().mean())
    first, second = 2 * 3 * 4 * 8, 2 * 3 * 8 * 2
    assert counter.forward() == first + second
    assert counter.full() == 2 * first + 3 * second  # data want no gradient
    assert counter.training(["2.weight"]) == first + 2 * second


def test_saved_bytes_of_one_layer_by_hand():
    """A linear layer saves its input when its weight is trained, nothing when nothing below or in it is."""
    layer, x = nn.Linear(4, 8, bias=False), torch.zeros(3, 4)
    assert saved_bytes(lambda: layer(x), excluding=layer.parameters()) == 3 * 4 * 4
    assert saved_bytes(lambda: layer(x)) == 3 * 4 * 4  # the weight is kept only for the gradient of an input
    layer.requires_grad_(False)
    assert saved_bytes(lambda: layer(x), excluding=layer.parameters()) == 0
    x.requires_grad_(True)
    assert saved_bytes(lambda: layer(x), excluding=layer.parameters()) == 0
    assert saved_bytes(lambda: layer(x)) == 8 * 4 * 4


def test_two_views_of_one_storage_count_once():
    x = torch.ones(4, 8, requires_grad=True)
    assert saved_bytes(lambda: (x[:2].square(), x[2:].square())) == 4 * 8 * 4


class StoppedError(Exception):
    pass


def test_prefix_layers_save_nothing_on_the_model_and_on_its_copy():
    model, batch = LlamaForCausalLM(LlamaConfig(**LLAMA)), tokens()
    owned, fake = find_chain(model).owned, fake_copy(model)
    for active in (1, 2, 3):
        real = saved_until_and_after(model, batch, set(owned[active]), active - 1)
        with fake.running():
            copied = saved_until_and_after(fake.model, batch, set(owned[active]), active - 1)
        assert real == copied
        assert real[0] == 0
        assert real[1] > 0


def saved_until_and_after(model: Any, batch: dict[str, Any], active: set[str], layer: int) -> tuple[int, int]:
    """Bytes saved before transformer layer `layer` is entered, and in the whole forward pass."""
    only(model, active)
    there = [*model.parameters(), *model.buffers()]

    def stop(*_):
        raise StoppedError

    def prefix():
        with pytest.raises(StoppedError):
            model(**batch)

    whole = saved_bytes(lambda: model(**batch), excluding=there)
    with model.model.layers[layer].register_forward_pre_hook(stop):
        return saved_bytes(prefix, excluding=there), whole


def test_a_measured_step_tells_both_its_flops_and_what_it_saves():
    model, batch = LlamaForCausalLM(LlamaConfig(**LLAMA)), tokens()
    counter, owned = StepCounter(model, batch), find_chain(model).owned
    for layer in (1, 3):
        cost = counter.measure(owned[layer])
        assert cost.flops == counter.training(owned[layer])
        assert cost.saved_bytes == saved_until_and_after(model, batch, set(owned[layer]), layer - 1)[1]


def test_the_lower_the_active_layer_the_more_is_saved():
    model, batch = LlamaForCausalLM(LlamaConfig(**LLAMA)), tokens()
    owned = find_chain(model).owned
    saved = [saved_until_and_after(model, batch, set(owned[layer]), layer - 1)[1] for layer in (1, 2, 3)]
    assert saved[0] > saved[1] > saved[2]


def test_a_trained_prefix_does_save():
    """So that the zero above means something."""
    model, batch = LlamaForCausalLM(LlamaConfig(**LLAMA)), tokens()
    everything = {name for name, _ in model.named_parameters()}
    assert saved_until_and_after(model, batch, everything, 2)[0] > 0


@pytest.mark.parametrize("name", MODELS)
def test_counts_by_operation_are_those_of_pytorchs_counter(name: str):
    build, batch_of = MODELS[name]
    model, batch = build(), batch_of()
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as theirs:
        step(model, batch)
    with FlopCounter() as ours:
        step(model, batch)
    assert ours.by_operation == theirs.get_flop_counts()["Global"]
    assert ours.total() == theirs.get_total_flops() > 0


def test_inference_mode_is_counted_too():
    """There a linear layer is one operation, which is made of others."""
    with torch.inference_mode():
        assert count_flops(lambda: nn.Linear(4, 8)(torch.zeros(3, 4))) == 2 * 3 * 4 * 8
        assert count_flops(lambda: torch.zeros(3, 4).is_contiguous()) == 0

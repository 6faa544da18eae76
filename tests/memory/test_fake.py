"""A fake copy runs like the model and touches nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from blocktrain.chain.resnet import resnet
from blocktrain.memory.fake import fake_copy
from blocktrain.memory.tracker import MemoryTracker

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def gpt2(**settings) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0, **settings
        )
    )


def test_all_tensors_are_fake_and_ties_and_modes_stay():
    model = gpt2()
    model.get_submodule("transformer.h.0").eval()
    copy = fake_copy(model).model
    assert all(isinstance(tensor, FakeTensor) for tensor in [*copy.parameters(), *copy.buffers()])
    assert all(isinstance(parameter, nn.Parameter) for parameter in copy.parameters())
    assert copy.get_parameter("lm_head.weight") is copy.get_parameter("transformer.wte.weight")
    assert [module.training for module in copy.modules()] == [module.training for module in model.modules()]


def test_the_model_is_untouched_by_a_training_step_of_its_copy():
    model = resnet(8)
    next(model.parameters()).grad = gradient = torch.ones_like(next(model.parameters()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fired = []
    model.conv1.register_forward_hook(lambda *_: fired.append(True))
    random_state = torch.get_rng_state()

    fake = fake_copy(model)
    batch = {"pixel_values": torch.zeros(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.long)}
    with fake.running():
        nn.functional.dropout(fake.model(**batch).loss).backward()

    assert torch.equal(torch.get_rng_state(), random_state)
    assert fired == []
    assert next(model.parameters()).grad is gradient
    assert all(parameter.grad is None for parameter in list(model.parameters())[1:])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is not None for parameter in fake.model.parameters())


def test_a_gradient_in_the_model_is_not_copied():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    assert fake_copy(model).model.get_parameter("weight").grad is None


def test_a_model_on_the_meta_device_is_copied_to_the_cpu():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**TINY))
    fake = fake_copy(model)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with fake.running():
        logits = fake.model(input_ids=tokens).logits
    assert (logits.device.type, tuple(logits.shape)) == ("cpu", (2, 8, 64))


def test_a_fake_copy_can_be_copied():
    fake = fake_copy(fake_copy(gpt2()).model)
    with fake.running():
        logits = fake.model(input_ids=torch.zeros(2, 8, dtype=torch.long)).logits
    assert tuple(logits.shape) == (2, 8, 64)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_run_on_fake_tensors(experts: str, dtype: torch.dtype):
    """The loop over experts asks for numbers, and the grouped product's shape function refuses float32."""
    model = MixtralForCausalLM(MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=4))
    nn.Module.to(model, dtype)  # transformers' own `to` is declared without self
    model.set_experts_implementation(experts)
    fake = fake_copy(model)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with fake.running():
        output = fake.model(input_ids=tokens, labels=tokens)
        output.loss.backward()
    assert output.logits.dtype == dtype
    assert all(parameter.grad is not None for parameter in fake.model.parameters())
    assert model.config._experts_implementation == experts


def test_a_model_that_draws_numbers_leaves_the_generator_as_it_was():
    """OPT with layer dropout draws one number a layer, on no tensor of its own: for real, even in a fake copy."""
    settings: dict[str, Any] = {**TINY, "ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.5}
    fake, tokens = fake_copy(OPTForCausalLM(OPTConfig(**settings)).train()), torch.zeros(2, 8, dtype=torch.long)
    random_state = torch.get_rng_state()
    with fake.running():
        fake.model(input_ids=tokens)
        assert not torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_copy_takes_the_same_attention_path_as_the_model(monkeypatch: pytest.MonkeyPatch):
    """With fake inputs transformers believed it was traced: an explicit mask, and no grouped queries in the kernel."""
    seen: list[tuple[Any, ...]] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, **options):
        shape = None if options.get("attn_mask") is None else tuple(options["attn_mask"].shape)
        seen.append((tuple(key.shape), shape, options.get("is_causal"), options.get("enable_gqa")))
        return attention(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model = LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=2))
    fake, tokens = fake_copy(model), torch.zeros(2, 8, dtype=torch.long)
    padding = torch.ones(2, 8, dtype=torch.long)
    padding[0, :3] = 0
    for mask in (None, torch.ones(2, 8, dtype=torch.long), padding):
        seen.clear()
        model(input_ids=tokens, attention_mask=mask, use_cache=False)
        with fake.running():
            fake.model(input_ids=tokens, attention_mask=mask, use_cache=False)
        assert len(seen) == 4
        assert seen[:2] == seen[2:]


def test_operations_in_place_are_seen_and_leave_shapes_as_they_would_be():
    """They are not run; those that change a shape are."""
    fake = fake_copy(nn.Linear(2, 1))
    weight = fake.model.get_parameter("weight").detach().clone()
    with fake.running(), MemoryTracker() as tracker:
        assert weight.mul_(2).add_(weight) is weight
        weight.copy_(torch.ones(1, 2))
        assert weight.squeeze_(0).shape == (2,)
        assert torch.zeros(2).add_(1).tolist() == [1, 1]  # a real one
    assert tracker.peak().bytes >= 8

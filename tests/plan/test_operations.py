"""The table of operations against autograd: what is kept to the byte, FLOPs to the FLOP."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from blocktrain.chain.cost import layer_costs
from blocktrain.chain.discovery import find_chain
from blocktrain.chain.partition import partition
from blocktrain.memory.flops import StepCounter
from blocktrain.plan.layout import Layout, card_view
from blocktrain.plan.operations import head_operations, kept_bytes, layer_operations, work
from blocktrain.plan.spec import ModelSpec
from blocktrain.plan.step import view_flops

SEQ, ROWS = 64, 2


def spec_of(architecture: str, **changes) -> ModelSpec:
    base = ModelSpec(
        name="small", architecture=architecture, layers=3, width=64, heads=4, kv_heads=4, head_width=16, inner=160,
        vocabulary=100, positions=SEQ, tied=architecture == "gpt2",
    )  # fmt: skip
    return replace(base, **changes)


SPECS = [
    spec_of("gpt2"),
    spec_of("llama"),
    spec_of("llama", kv_heads=2),
    spec_of("qwen2", kv_heads=2, qkv_bias=True),
    spec_of("qwen3", kv_heads=2, head_norms="heads", head_width=32),
]


def model_of(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    settings = AutoConfig.for_model(
        spec.architecture, **spec.settings(), use_cache=False, bos_token_id=None, eos_token_id=None
    )
    return AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa").to(dtype)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros(ROWS, SEQ, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def kept(spec: ModelSpec, dtype: torch.dtype, *, trained: bool) -> int:
    """Bytes that one more layer keeps."""
    total = []
    for layers in (2, 3):
        model = model_of(replace(spec, layers=layers), dtype)
        names = [name for name, _ in model.named_parameters()]
        chosen = names if trained else [name for name in names if "embed_tokens" in name or "wte" in name]
        total.append(StepCounter(model, batch()).measure(chosen).saved_bytes)
    return total[1] - total[0]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.architecture}-{spec.kv_heads}")
@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("trained", [True, False])
def test_a_layer_keeps_what_autograd_keeps(spec: ModelSpec, size: int, trained: bool) -> None:
    real = kept(spec, torch.float32 if size == 4 else torch.bfloat16, trained=trained)
    assert ROWS * SEQ * kept_bytes(layer_operations(spec, size), size, trained=trained) == real


def test_a_mixture_keeps_nearly_that() -> None:
    """Routing weights and indices of a token are left out: under two per cent even at this width."""
    spec = spec_of("mixtral", kv_heads=2, experts=4, experts_used=2)
    real = kept(spec, torch.float32, trained=True)
    assert ROWS * SEQ * kept_bytes(layer_operations(spec, 4), 4, trained=True) == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.architecture}-{spec.kv_heads}")
def test_flops_are_the_counted_ones(spec: ModelSpec) -> None:
    model = model_of(spec)
    embedding, layer, *_, head = layer_costs(find_chain(model), batch())
    mine, top = work(layer_operations(spec, 4), SEQ), work(head_operations(spec, 4), SEQ)
    tokens = ROWS * SEQ
    assert tokens * mine.matrix_flops == layer.forward_flops_weights
    assert tokens * mine.attention_flops == layer.forward_flops_attention
    assert tokens * mine.attention_backward_flops == layer.backward_flops_attention
    assert tokens * top.matrix_flops == head.forward_flops_weights
    assert embedding.forward_flops == 0


def test_a_steps_flops_are_the_counted_ones() -> None:
    spec = spec_of("llama", kv_heads=2, tied=False)
    model = model_of(spec)
    counter = StepCounter(model, batch())
    for block in partition(model, num_blocks=3):
        planned = ROWS * view_flops(spec, Layout(blocks=3), SEQ, card_view(spec, 3, block.index))
        assert planned == pytest.approx(counter.training(block.parameters), rel=0.03)

"""Checkpointing changes what is kept, and nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import blocktrain as bt
from blocktrain.chain.block import Block, Partition
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.chain.checkpointing import checkpointed_layers, checkpointing
from blocktrain.chain.cost import layer_costs, theoretical_step_flops
from blocktrain.chain.freezing import activate, release
from blocktrain.memory.flops import StepCounter, saved_bytes
from blocktrain.modules.wrap import wrap_forward

from ..tiny_models import LLAMA_SIZES, gpt2, llama

TOKENS = torch.arange(32).reshape(2, 16) % 61
SIZES: dict[str, Any] = LLAMA_SIZES | {"num_hidden_layers": 4}


def qwen_moe() -> Any:
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
    experts |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**SIZES, **experts))


def opt() -> Any:
    """Dropout by function, which asks the layer's own mode."""
    return hf.OPTForCausalLM(hf.OPTConfig(**SIZES, ffn_dim=24, word_embed_proj_dim=16))


def text() -> dict[str, Any]:
    return {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}


def images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4)}


MODELS = {
    "gpt2": (gpt2, text),
    "llama": (llama, text),
    "qwen moe": (qwen_moe, text),
    "opt": (opt, text),
    "resnet": (lambda: bt.resnet(8, shortcut="projected"), images),
}


def step(parts: Partition, block: Block, batch: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """Loss, gradients, buffers and the state of the random numbers after a step; buffers are then put back."""
    model = parts.model
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(1)
    activate(parts, block, **options)
    loss = model(**batch).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == block.parameters.keys()
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    found |= {"loss": loss.detach(), "random numbers": torch.get_rng_state()}
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    release(parts)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("boundaries", ["device", "host"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_statistics_and_random_numbers_stay_bit_for_bit(name: str, boundaries: Any):
    """A second run must draw the first one's dropout, and must not move a BatchNorm's statistics once more."""
    build, batch_of = MODELS[name]
    parts, batch = bt.partition(build(), num_blocks=3), batch_of()
    for block in (*parts, parts.whole):
        expected = step(parts, block, batch)
        with checkpointing(parts, boundaries=boundaries):
            assert_same(step(parts, block, batch), expected)


def test_dropout_in_frozen_layers_is_drawn_again_as_it_was():
    parts = bt.partition(gpt2(), num_blocks=3)
    expected = step(parts, parts[0], text(), frozen_dropout=True)
    with checkpointing(parts):
        assert_same(step(parts, parts[0], text(), frozen_dropout=True), expected)
    assert not torch.equal(step(parts, parts[0], text())["loss"], expected["loss"])


class Counting:
    """Counts how often a module runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return run(*args, **kwargs)


@pytest.mark.parametrize("theirs", [None, False, True])
def test_the_prefix_runs_once_and_keeps_nothing_the_others_run_twice(theirs: bool | None):
    """Nor is a layer run three times where Hugging Face's own checkpointing is on, reentrant or not."""
    parts = bt.partition(llama(), num_blocks=3)
    if theirs is not None:
        model: Any = parts.model
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # newer, older
        enable({"use_reentrant": theirs})
    counts: list[Counting] = []
    for layer in parts.chain.layers[1:-1]:
        counts.append(Counting())
        for module in layer.modules.values():
            wrap_forward(module, counts[-1])  # further in than checkpointing, as weights fetched for the occasion are
    with checkpointing(parts) if theirs is None else nullcontext():
        step(parts, parts[1], text())
    first = parts[1].boundary
    assert [count.runs for count in counts] == [1] * (first - 1) + [2] * (len(counts) - first + 1)


def test_everything_is_as_before_afterwards():
    parts = bt.partition(gpt2(), num_blocks=3)
    with checkpointing(parts):
        assert sum("forward" in vars(module) for module in parts.model.modules()) == 4
    assert not any("forward" in vars(module) for module in parts.model.modules())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_run_from_stored_hidden_states_is_recomputed_from_them(name: str):
    build, batch_of = MODELS[name]
    parts, batch = bt.partition(build(), num_blocks=3), batch_of()
    block, runner = parts[1], BoundaryRunner(parts.chain)
    activate(parts, block)
    runner.check(batch, block.boundary)
    hidden = runner.states(batch, [block.boundary])[block.boundary]
    expected = step(parts, block, batch)
    with checkpointing(parts), runner.running(start=block.boundary, hidden=hidden):
        assert_same(step(parts, block, batch), expected)


# -- caches of keys and values ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_model_is_recomputed():
    """torch.compile refused the context around the second run, and could not read a context variable."""
    model = llama()
    model.config.use_cache = False
    optimizer = bt.BlockOptimizer(bt.partition(model, num_blocks=3), torch.optim.SGD, lr=0.1)
    ids = torch.arange(16).view(2, 8)
    found = []
    with checkpointing(optimizer.partition), optimizer.visit(optimizer.partition[1]):
        for each in (model, torch.compile(model, backend="eager")):
            each(input_ids=ids, labels=ids).loss.backward()
            found.append([gradient.clone() for gradient in optimizer.gradients()])
            optimizer.zero_grad()
    assert found[0]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_cache_is_not_written_twice_and_a_filled_one_is_read():
    parts = bt.partition(llama(), num_blocks=3)
    model: Any = parts.model
    activate(parts, parts[0])

    def continued(context: AbstractContextManager[Any]) -> Tensor:
        with torch.no_grad():
            past = model(input_ids=TOKENS[:, :8], use_cache=True).past_key_values
        with context:
            loss = model(input_ids=TOKENS[:, 8:], labels=TOKENS[:, 8:], past_key_values=past).loss
            loss.backward()
        assert past.get_seq_length() == 16
        return loss.detach()

    assert torch.equal(continued(nullcontext()), continued(checkpointing(parts)))
    with checkpointing(parts):
        output = model(input_ids=TOKENS, labels=TOKENS, use_cache=True)
        output.loss.backward()
        assert output.past_key_values.get_seq_length() == 0
        with torch.no_grad():  # a forward pass alone, as in generation, fills it
            assert model(input_ids=TOKENS, use_cache=True).past_key_values.get_seq_length() == 16


# -- what it saves and costs ------------------------------------------------------------------------------------------


def wide(name: str) -> nn.Module:
    sizes: dict[str, Any] = SIZES | {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6}
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    config = hf.GPT2Config(n_layer=6, n_embd=128, n_head=2, n_positions=16, vocab_size=64)
    config.bos_token_id = config.eos_token_id = 0
    return hf.GPT2LMHeadModel(config)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_counted_flops_hold_the_second_run_and_the_closed_form_agrees(name: str):
    """With dropout GPT-2's active layers end in something kept, so their last product is computed again too."""
    parts, batch = bt.partition(wide(name), num_blocks=3), text()
    layers = checkpointed_layers(parts.chain)
    assert layers == [1, 2, 3, 4, 5, 6]
    for block in parts:
        activate(parts, block)
        costs, plain = layer_costs(parts.chain, batch), StepCounter(parts.model, batch).measure(block.parameters)
        with checkpointing(parts):
            counted = StepCounter(parts.model, batch).measure(block.parameters)
        active = [index for index, layer in enumerate(parts.chain.layers) if layer in block.layers]
        again = sum(costs[index].recompute_flops for index in layers if index >= active[0])
        assert counted.flops - plain.flops == pytest.approx(again, rel=0.02)
        theory = theoretical_step_flops(costs, active, checkpointed=layers)
        assert theory == pytest.approx(counted.flops, rel=0.02)
        release(parts)


def test_saved_bytes_are_inputs_the_largest_layer_and_what_lies_outside_of_layers():
    model, batch = wide("llama"), text()
    parts = bt.partition(model, num_blocks=1)
    activate(parts, parts.whole)
    plain = StepCounter(model, batch).measure(parts.whole.parameters).saved_bytes
    with checkpointing(parts):
        kept = StepCounter(model, batch).measure(parts.whole.parameters).saved_bytes
        seen = saved_bytes(lambda: model(**batch), excluding=[*model.parameters(), *model.buffers()])
    with checkpointing(parts, boundaries="host"):
        away = StepCounter(model, batch).measure(parts.whole.parameters).saved_bytes
    boundary, layer = TOKENS.numel() * 128 * 4, kept - seen
    rotary = 16 * (2 * 64 * 4 + 8)  # positions and their two tables, which all layers share
    assert kept - away == 6 * boundary + rotary
    assert plain == pytest.approx(seen + 6 * layer, rel=0.02)

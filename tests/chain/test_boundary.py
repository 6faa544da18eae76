"""Run from a boundary, a model is the same model: losses and gradients are equal, FLOPs are less by the prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import set_checkpoint_early_stop

import blocktrain as bt
from blocktrain.chain.block import Block, Partition
from blocktrain.chain.boundary import BoundaryError, BoundaryRunner
from blocktrain.chain.chain import Chain
from blocktrain.chain.cost import layer_costs
from blocktrain.chain.freezing import activate
from blocktrain.memory.flops import count_flops

from .test_huggingface import MATRIX, build

Batch = dict[str, Any]


class Front(nn.Module):
    """A layer that returns a tuple, as some decoders' layers do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(self.linear(hidden_states)), None


class Tuples(nn.Module):
    """Layers called by name that return tuples."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Front() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(hidden_states=x)
        return x


def tokens() -> Batch:
    ids = torch.randint(3, 96, (2, 12))
    return {"input_ids": ids, "labels": ids}


def images() -> Batch:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 10, (4,))}


def sequential() -> nn.Module:
    """With an activation that writes into what it is given, and layers of different widths."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 16), nn.ReLU(inplace=True), nn.Linear(16, 24), nn.Dropout(0.5), nn.Linear(24, 4)
    )


def tuples() -> Partition:
    return bt.partition(Tuples(), num_blocks=3, layers={str(index): [f"layers.{index}"] for index in range(4)})


def decoder(name: str, *, tied: bool = True) -> Partition:
    return bt.partition(build(name, tied=tied), num_blocks=3)


MODELS: dict[str, tuple[Callable[[], Partition], Callable[[], Batch]]] = {
    **{name: (partial(decoder, name), tokens) for name in MATRIX},
    "gpt2 untied": (partial(decoder, "gpt2", tied=False), tokens),
    "llama untied": (partial(decoder, "llama", tied=False), tokens),
    "llama with padding": (
        partial(decoder, "llama"),
        lambda: tokens() | {"attention_mask": torch.tensor([[1] * 12, [0] * 5 + [1] * 7])},
    ),
    "sequential": (lambda: bt.partition(sequential(), num_blocks=3), lambda: {"input": torch.randn(3, 3, 4)}),
    "tuples": (tuples, lambda: {"x": torch.randn(3, 8)}),
    "resnet": (lambda: bt.partition(bt.resnet(8), num_blocks=3), images),
    "resnet by flops": (lambda: bt.partition(bt.resnet(8), 3, balance="flops", batch=images()), images),
}


def step(model: nn.Module, block: Block, batch: Batch) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss and the active block's gradients, dropout drawn from the same seed each time."""
    torch.manual_seed(7)
    model.zero_grad()
    output = model(**batch)
    loss = output.square().mean() if isinstance(output, Tensor) else output.loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in block.parameters.items()}


def same(one: tuple[Tensor, dict[str, Tensor | None]], other: tuple[Tensor, dict[str, Tensor | None]]) -> bool:
    assert any(gradient is not None for gradient in one[1].values())
    pairs = [(a, other[1][name]) for name, a in one[1].items()]
    return torch.equal(one[0], other[0]) and all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
    )


@contextmanager
def counted_calls(modules: list[nn.Module]) -> Iterator[list[nn.Module]]:
    """Which of `modules` are called."""
    called: list[nn.Module] = []
    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(lambda module, _: called.append(module)).remove)
        yield called


@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_and_flops_at_every_boundary(name: str):
    make, batch_of = MODELS[name]
    parts, batch = make(), batch_of()
    model, runner, costs = parts.model, BoundaryRunner(parts.chain), layer_costs(parts.chain, batch)
    for block in parts.blocks[1:]:
        boundary = block.boundary
        activate(parts, block)
        runner.check(batch, boundary)
        whole = step(model, block, batch)
        hidden = runner.states(batch, [boundary])[boundary]
        assert not hidden.requires_grad
        before = hidden.clone()
        prefix_layers = parts.chain.layers[1:boundary]
        below = [module for layer in prefix_layers for top in layer.modules.values() for module in top.children()]
        with counted_calls(below) as called, runner.running(start=boundary, hidden=hidden):
            cached = step(model, block, batch)
        assert same(whole, cached), block
        assert not called
        assert torch.equal(hidden, before)  # what is stored is not written into

        all_flops = count_flops(lambda block=block: step(model, block, batch))
        with runner.running(start=boundary, hidden=hidden):
            fewer = count_flops(lambda block=block: step(model, block, batch))
        prefix = sum(cost.forward_flops for cost in costs[:boundary])
        assert all_flops - fewer == prefix
        assert count_flops(lambda boundary=boundary: runner.states(batch, [boundary])) == prefix


def test_dropout_acts_in_the_active_block_alone_so_the_comparison_above_includes_it():
    parts, batch = decoder("gpt2"), tokens()
    for block in parts:
        activate(parts, block)
        losses = {parts.model(**batch).loss.item() for _ in range(3)}
        assert len(losses) == 3


def test_the_comparison_can_tell_a_difference():
    parts, batch = decoder("llama"), tokens()
    activate(parts, parts[1])
    boundary = parts[1].boundary
    runner = BoundaryRunner(parts.chain)
    hidden = runner.states(batch, [boundary])[boundary]
    whole = step(parts.model, parts[1], batch)
    with runner.running(start=boundary, hidden=hidden.nextafter(hidden + 1)):
        assert not same(whole, step(parts.model, parts[1], batch))


def test_states_of_several_boundaries_in_one_pass_that_stops_at_the_highest():
    parts, batch = decoder("llama"), tokens()
    runner, costs = BoundaryRunner(parts.chain), layer_costs(parts.chain, batch)
    above = [module for layer in parts.chain.layers[3:] for top in layer.modules.values() for module in top.modules()]
    with counted_calls([module for module in above if module is not runner._entry(3)]) as called:
        states = runner.states(batch, [3, 1, 2])
    assert not called
    assert set(states) == {1, 2, 3}
    with torch.no_grad():
        assert torch.equal(states[1], parts.model.get_submodule("model.embed_tokens")(batch["input_ids"]))
    further = runner.states(batch, [2, 3], start=1, hidden=states[1])
    assert torch.equal(further[2], states[2])
    assert torch.equal(further[3], states[3])
    counted = count_flops(lambda: runner.states(batch, [3], start=2, hidden=states[2]))
    assert counted == costs[2].forward_flops


class MidwayError(Exception):
    pass


def test_after_an_exception_inside_everything_is_as_before():
    parts, batch = decoder("gpt2"), tokens()
    runner, modules = BoundaryRunner(parts.chain), list(parts.model.modules())
    hidden = runner.states(batch, [3])[3]
    with suppress(MidwayError), runner.running(start=3, hidden=hidden):
        assert "forward" in vars(parts.model.get_submodule("transformer.h.0"))
        raise MidwayError
    wrong = {"input_ids": torch.full((2, 12), 500)}  # no such token: the model itself fails
    for failing in (
        lambda: runner.states(wrong, [3]),
        lambda: runner.states(wrong, [3], start=1, hidden=hidden),
        lambda: runner.check(wrong, 3),
    ):
        with pytest.raises(IndexError):
            failing()
    assert not any("forward" in vars(module) for module in modules)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)


def test_a_forward_method_that_somebody_replaced_is_put_back():
    """accelerate, peft and others replace `forward` on the instance: leaving the cut once deleted theirs."""
    parts = bt.partition(sequential(), num_blocks=3)
    first = parts.model[1]  # pyright: ignore[reportIndexIssue] - an nn.Sequential
    theirs = first.forward = lambda x: F.linear(x, first.weight, first.bias) + 1
    batch = {"input": torch.randn(3, 3, 4)}
    runner = BoundaryRunner(parts.chain)
    with runner.running(start=1, hidden=runner.states(batch, [1])[1]):
        assert first.forward is not theirs
    assert first.forward is theirs


def test_a_check_leaves_modes_and_batchnorm_alone():
    parts, batch = bt.partition(bt.resnet(8), num_blocks=3), images()
    activate(parts, parts[2])
    modes = {module: module.training for module in parts.model.modules()}
    buffers = {name: buffer.clone() for name, buffer in parts.model.named_buffers()}
    BoundaryRunner(parts.chain).check(batch, parts[2].boundary)
    assert {module: module.training for module in parts.model.modules()} == modes
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in parts.model.named_buffers())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_activation_checkpointing_inside_the_cut(name: str):
    """The backward pass runs the active layers again: from the stored states, as the cut is still there."""
    parts, batch = decoder(name), tokens() | {"use_cache": False}
    model: Any = parts.model
    block = parts[1]
    boundary = block.boundary
    if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers 5.20 or so
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    activate(parts, block)
    runner, costs = BoundaryRunner(parts.chain), layer_costs(parts.chain, batch)
    runner.check(batch, boundary)
    whole = step(model, block, batch)
    hidden = runner.states(batch, [boundary])[boundary]
    with set_checkpoint_early_stop(False):
        all_flops = count_flops(lambda: step(model, block, batch))
        with runner.running(start=boundary, hidden=hidden):
            assert same(whole, step(model, block, batch))
            assert all_flops - count_flops(lambda: step(model, block, batch)) == sum(
                cost.forward_flops for cost in costs[:boundary]
            )


class SkippingModel(nn.Module):
    """What the first layer puts out crosses every boundary."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return x + first


class NamedModel(SkippingModel):
    """Layers called with a name that says nothing."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(input=x)
        return x


class SkippedModel(SkippingModel):
    """The third layer's module is never called as a module."""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer.forward(x) if index == 2 else layer(x)  # pyright: ignore[reportCallIssue]
        return x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (SkippingModel, "run from layer 2 differs from the full run: more than the hidden states crosses"),
        (NamedModel, r"called with \['input'\] by name: its hidden states must be the first positional argument"),
        (SkippedModel, "did not reach layer 2"),
    ],
)
def test_what_cannot_be_cut_says_so(model: type[nn.Module], message: str):
    chain = Chain.of_modules(model(), {str(index): [f"layers.{index}"] for index in range(4)})
    with pytest.raises(BoundaryError, match=message):
        BoundaryRunner(chain).check({"x": torch.randn(2, 4)}, 2)


def test_a_module_on_both_sides_of_the_boundary_is_refused():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Linear(4, 4), shared)
    chain = Chain.of_modules(model, {"0": ["0"], "1": ["1"], "2": ["2"]})
    with pytest.raises(BoundaryError, match="differs from the full run"):
        BoundaryRunner(chain).check({"input": torch.randn(2, 4)}, 1)
    assert "forward" not in vars(shared)


def test_a_loss_over_the_routers_of_all_layers_is_refused():
    """With `output_router_logits` the logits are the same from a boundary and the loss nearly so, but it balances the
    routers above the boundary alone: the gradients of those are twice and thrice what they should be."""
    kind, settings, *_ = MATRIX["mixtral"]
    config = kind(**settings, output_router_logits=True, router_aux_loss_coef=1.0)
    parts = bt.partition(hf.MixtralForCausalLM(config), num_blocks=3)
    with pytest.raises(
        BoundaryError, match=r"MixtralForCausalLM has a part from the routers of all .*output_router_logits"
    ):
        BoundaryRunner(parts.chain).check(tokens(), parts[2].boundary)


class BiasedLossModel(SkippingModel):
    """Logits that can be cut, and a loss that adds something of the lowest layer."""

    def forward(self, x: Tensor) -> Any:
        extra = x = self.layers[0](x)
        for layer in list(self.layers)[1:]:
            x = layer(x)
        return SimpleNamespace(logits=x, loss=x.mean() + extra.square().mean())


def test_a_loss_that_reads_below_the_boundary_is_refused():
    chain = Chain.of_modules(BiasedLossModel(), {str(index): [f"layers.{index}"] for index in range(4)})
    with pytest.raises(BoundaryError, match="differs from the full run"):
        BoundaryRunner(chain).check({"x": torch.randn(2, 4)}, 2)


def test_a_model_that_puts_out_nan_can_still_be_cut():
    """Its losses say what is wrong; the cut is not to blame."""
    parts, batch = decoder("llama"), tokens()
    with torch.no_grad():
        parts.model.get_submodule("lm_head").weight[5] = float("nan")  # pyright: ignore[reportIndexIssue]
    BoundaryRunner(parts.chain).check(batch, 2)


def test_embeddings_are_looked_up_and_nothing_else_below_runs():
    runner = BoundaryRunner(decoder("opt-350m").chain)
    names = {module: name for name, module in runner.chain.model.named_modules()}
    skipped = [names[module] for module in runner.skipped_modules(2)]
    assert skipped == ["model.decoder.project_in", "model.decoder.layers.0"]
    assert runner.skipped_modules(0) == []

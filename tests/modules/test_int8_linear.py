"""Frozen linear layers in int8: the products, when they are used, and that nothing else changes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import blocktrain as bt
from blocktrain.chain.checkpointing import checkpointing
from blocktrain.contrib.learning_tail import Tail
from blocktrain.errors import ConfigError
from blocktrain.modules import int8_linear
from blocktrain.modules.int8_linear import Int8Layers, Int8Weight
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.precision import BF16_EXACT, FP32, INT8, NF4, Precision
from blocktrain.optim.weight_store import OnHost

from ..tiny_models import LLAMA_SIZES, gpt2, llama

PRECISIONS = pytest.mark.parametrize("precision", [FP32, BF16_EXACT, INT8], ids=lambda precision: precision.name)
STILL: Any = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
MODELS = pytest.mark.parametrize(
    "make", [llama, lambda: gpt2(**STILL)], ids=["llama", "gpt2"]
)  # the head of GPT-2 is tied to its embedding, Llama's is not
TOKENS = torch.arange(48).view(3, 16) % 7 * 9


def optimizer_of(model: nn.Module, precision: Precision = FP32, **options: Any) -> BlockOptimizer:
    partition = bt.partition(model, num_blocks=3)
    return BlockOptimizer(partition, torch.optim.AdamW, lr=1e-2, precision=precision, **options)


def loss_of(optimizer: BlockOptimizer) -> Tensor:
    return optimizer.partition.model(input_ids=TOKENS, labels=TOKENS).loss


def step(optimizer: BlockOptimizer) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of a step on the active block."""
    loss = loss_of(optimizer)
    loss.backward()
    gradients = [gradient.clone() for gradient in optimizer.gradients()]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), gradients


def layers_of(optimizer: BlockOptimizer) -> Int8Layers:
    layers = optimizer._weights._int8
    assert layers is not None
    return layers


# -- the product ------------------------------------------------------------------------------------------------------


def codes_of(rows: Tensor, steps: int = 127) -> tuple[Tensor, Tensor]:
    """The obvious way, in fp64: (integers, scales)."""
    scales = rows.double().abs().amax(1, keepdim=True) / steps
    return (rows.double() / scales).round(), scales


@pytest.mark.parametrize(("width", "out"), [(24, 40), (24, 24), (40, 24)])
def test_both_directions_are_products_of_rounded_rows(width: int, out: int) -> None:
    weight, rows, gradient = torch.randn(out, width), torch.randn(9, width), torch.randn(9, out)
    quantized = Int8Weight.of(weight)
    codes, scales = codes_of(weight)
    assert torch.equal(quantized.codes.double(), codes)
    of_rows, row_scales = codes_of(rows, 127 * 254)
    expected = of_rows * row_scales @ (codes * scales).T
    torch.testing.assert_close(quantized.forward(rows).double(), expected, rtol=1e-5, atol=5e-4)
    of_gradient, gradient_scales = codes_of(gradient * quantized.scales)
    torch.testing.assert_close(
        quantized.input_gradient(gradient).double(), of_gradient * gradient_scales @ codes, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("layer", [nn.Linear(20, 12), nn.Linear(12, 20, bias=False), Conv1D(20, 12)])
def test_a_layer_in_int8_is_close_to_the_exact_one(layer: Any) -> None:
    """Rounding to 1/127 of a row's largest entry loses about 1 % here."""
    x = torch.randn(2, 5, layer.weight.shape[0] if isinstance(layer, Conv1D) else layer.in_features, requires_grad=True)
    exact = layer(x)
    (exact_gradient,) = torch.autograd.grad(exact.square().sum(), x)
    active = nn.Linear(1, 1)
    layers = Int8Layers(nn.ModuleList([layer, active]), exact=[active])
    layer.requires_grad_(False)
    layers.activate([active], active.parameters())
    result = layer(x)
    (gradient,) = torch.autograd.grad(result.square().sum(), x)
    for found, expected in ((result, exact), (gradient, exact_gradient)):
        assert 0 < (found - expected).norm() < 0.02 * expected.norm()
    layers.close()
    assert torch.equal(layer(x), exact)


def test_a_row_has_the_same_result_in_any_batch() -> None:
    weight, rows, gradient = Int8Weight.of(torch.randn(24, 40)), torch.randn(9, 40), torch.randn(9, 24)
    assert torch.equal(weight.forward(rows)[3:5], weight.forward(rows[3:5]))
    assert torch.equal(weight.input_gradient(gradient)[3:5], weight.input_gradient(gradient[3:5]))


def test_outliers_do_not_drown_the_other_inputs_of_their_row() -> None:
    """An input of 1000 beside ones of about 1, as down projections have, leaves plain int8 nothing of the others."""
    weight, rows = torch.randn(40, 24), torch.randn(9, 24)
    weight[:, 0] = 0  # so that only the others count
    rows[:, 0] = 1000
    exact = rows @ weight.T
    assert (Int8Weight.of(weight).forward(rows) - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_what_is_not_finite_stays_so_and_in_its_row(bad: float, shape: tuple[int, int]) -> None:
    weight = Int8Weight.of(torch.randn(shape))
    for product, width in ((weight.forward, shape[1]), (weight.input_gradient, shape[0])):
        rows = torch.randn(3, width)
        rows[1, 2] = bad
        finite = product(rows).isfinite()
        assert finite.all(1).tolist() == [True, False, True]
        assert not finite[1].any()


def test_rows_of_zeros_and_of_tiny_numbers() -> None:
    weight = Int8Weight.of(torch.stack([torch.zeros(8), torch.ones(8), torch.full((8,), 1e-38)]))
    rows = torch.stack([torch.zeros(8), torch.full((8,), 1e-38), torch.ones(8)])
    assert weight.forward(rows).isfinite().all()
    assert torch.equal(weight.forward(rows)[0], torch.zeros(3))
    assert weight.forward(rows)[2, 1] == pytest.approx(8)


@pytest.mark.parametrize("make", [lambda: nn.Linear(20, 12), lambda: Conv1D(20, 12)])
def test_a_dequantized_weight_is_the_rounded_one(make: Any) -> None:
    weight = make().weight.detach()
    transposed = weight.shape == (12, 20) and make().__class__ is Conv1D
    found = Int8Weight.of(weight, transposed=transposed).dequantize()
    assert found.shape == weight.shape
    assert (found - weight).abs().max() <= weight.abs().max() / 254 * 1.001


# -- when it is used --------------------------------------------------------------------------------------------------


@PRECISIONS
@MODELS
def test_training_in_int8_is_close_to_exact_training(make: Any, precision: Precision) -> None:
    losses: dict[str, list[float]] = {}
    for compute in ("exact", "int8"):
        torch.manual_seed(0)
        optimizer, mine = optimizer_of(make(), precision, frozen_compute=compute), losses.setdefault(compute, [])
        for block in optimizer.partition:
            with optimizer.visit(block):
                mine += [float(step(optimizer)[0]) for _ in range(2)]
    assert losses["int8"] != losses["exact"]
    assert losses["int8"] == pytest.approx(losses["exact"], rel=2e-2)


@MODELS
def test_what_is_active_or_evaluated_computes_exactly(make: Any) -> None:
    torch.manual_seed(0)
    exact = optimizer_of(make())
    torch.manual_seed(0)
    int8 = optimizer_of(make(), frozen_compute="int8")
    for optimizer in (exact, int8):
        with optimizer.visit(optimizer.partition.union(range(3))):
            torch.manual_seed(1)
            step(optimizer)
    assert torch.equal(loss_of(exact), loss_of(int8))  # between visits
    with exact.visit(exact.partition[1]), int8.visit(int8.partition[1]):
        assert not torch.equal(loss_of(exact), loss_of(int8))
        exact.partition.model.eval()
        int8.partition.model.eval()
        assert torch.equal(loss_of(exact), loss_of(int8))


@PRECISIONS
def test_every_layer_of_a_frozen_block_but_the_head_computes_in_int8(precision: Precision) -> None:
    optimizer = optimizer_of(llama(), precision, frozen_compute="int8")
    layers, block = layers_of(optimizer), optimizer.partition[1]
    with optimizer.visit(block):
        step(optimizer)
        matrices = {name for name, p in optimizer.partition.model.named_parameters() if p in layers.weights}
    frozen = {name for other in (0, 2) for name in optimizer.partition[other].parameters}
    assert matrices == {name for name in frozen if name.endswith("proj.weight")}


@PRECISIONS
def test_weights_are_quantized_once_from_what_training_left(precision: Precision, monkeypatch) -> None:
    optimizer = optimizer_of(llama(), precision, frozen_compute="int8")
    first, second = optimizer.partition[0], optimizer.partition[1]
    with optimizer.visit(first):
        step(optimizer)
    made, of = [], Int8Weight.of
    with optimizer.visit(second):
        loss_of(optimizer)
        monkeypatch.setattr(Int8Weight, "of", lambda *args, **options: made.append(1) or of(*args, **options))
        step(optimizer)
        assert made == []
        for name, weight in optimizer.block_weights(0).items():
            copy = layers_of(optimizer).weights.get(first.parameters[name])
            if copy is not None:
                assert torch.equal(copy.codes, of(weight).codes)


@PRECISIONS
def test_loaded_weights_are_quantized_again(precision: Precision) -> None:
    optimizer = optimizer_of(llama(), precision, frozen_compute="int8")
    doubled = {name: 2 * weight for name, weight in optimizer.block_weights(0).items()}
    losses = []
    for _ in range(2):
        with optimizer.visit(optimizer.partition[1]):
            losses.append(loss_of(optimizer).item())
        optimizer.load_block_weights(0, doubled)
    twin = optimizer_of(llama(), precision, frozen_compute="int8")
    for index in range(3):
        twin.load_block_weights(index, optimizer.block_weights(index))
    with twin.visit(twin.partition[1]):
        assert loss_of(twin).item() == losses[1] != losses[0]


@PRECISIONS
@MODELS
def test_checkpointed_activations_give_the_same_gradients(make: Any, precision: Precision) -> None:
    optimizer = optimizer_of(make(), precision, frozen_compute="int8")
    with optimizer.visit(optimizer.partition[0]):
        loss_of(optimizer).backward()
        plain = [gradient.clone() for gradient in optimizer.gradients()]
        optimizer.zero_grad()
        with checkpointing(optimizer.partition):
            loss_of(optimizer).backward()
        assert all(map(torch.equal, plain, optimizer.gradients()))


def test_int8_weights_compute_as_they_are_stored(monkeypatch) -> None:
    optimizer = optimizer_of(llama(), INT8, frozen_compute="int8")
    rebuilt = []
    monkeypatch.setattr(Int8Weight, "dequantize", lambda *args: rebuilt.append(1))
    with optimizer.visit(optimizer.partition[0]):
        step(optimizer)
    assert rebuilt == []


@PRECISIONS
def test_bytes_of_the_weights(precision: Precision) -> None:
    optimizer = optimizer_of(llama(), precision, frozen_compute="int8")
    for block in optimizer.partition:
        with optimizer.visit(block):
            step(optimizer)
            stored = {id(tensor): tensor.nbytes for tensor in optimizer.tensors()["frozen"]}
            own = [p for p in optimizer.partition.model.parameters() if not hasattr(p, "_backing_tensors")]
            assert optimizer.weight_bytes(block) == sum(stored.values()) + sum(p.nbytes for p in own)


def test_autocast_decides_the_dtype() -> None:
    optimizer = optimizer_of(llama(), frozen_compute="int8")
    seen = []
    up = optimizer.partition.model.get_submodule("model.layers.0.mlp.up_proj")
    up.register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    with optimizer.visit(optimizer.partition[2]), torch.autocast("cpu", torch.bfloat16):
        loss_of(optimizer).backward()
    assert seen == [torch.bfloat16]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frozen": OnHost()}, "set frozen = 'device', not 'host'"),
        ({"precision": NF4}, "set precision = 'int8', not 'nf4'"),
        ({"tail": Tail(rule="sgd")}, "updates frozen weights in each step"),
        ({"frozen_compute": "fp8"}, "'fp8' is unknown; give one of exact, int8"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizer_of(llama(), **{"frozen_compute": "int8", **options})


def test_a_model_without_such_layers_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(ConfigError, match="Sequential has no linear layer below its head"):
        BlockOptimizer(bt.partition(model, num_blocks=2), torch.optim.SGD, lr=0.1, frozen_compute="int8")


def test_a_device_without_the_product_is_refused(monkeypatch) -> None:
    def int_mm(*_: Tensor) -> Tensor:
        raise RuntimeError("not implemented")

    monkeypatch.setattr(torch, "_int_mm", int_mm)
    with pytest.raises(ConfigError, match="no int8 matrix product on 'cpu'"):
        optimizer_of(llama(), frozen_compute="int8")


def test_weights_that_stay_exact_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = hf.MixtralForCausalLM(hf.MixtralConfig(num_hidden_layers=3, num_local_experts=4, **LLAMA_SIZES))
    with caplog.at_level(logging.WARNING, logger=int8_linear.__name__):
        optimizer = optimizer_of(model, frozen_compute="int8")
        with optimizer.visit(optimizer.partition[1]):
            step(optimizer)
    (record,) = caplog.records
    assert "6 weights compute exactly" in record.getMessage()
    assert "experts" in record.getMessage()

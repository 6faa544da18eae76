"""AdamW with 8-bit state stays close to AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blocktrain.chain.partition import partition
from blocktrain.errors import ConfigError
from blocktrain.optim import adamw8bit
from blocktrain.optim.adamw8bit import GROUP, SMALLEST, AdamW8bit, decode, encode
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.precision import BF16_EXACT, Precision
from blocktrain.optim.quantize_weights import has_bitsandbytes
from blocktrain.optim.state_store import KeepOnDisk

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}


def trained(
    cls, shape: tuple[int, ...], steps: int = 20, *, decades: int = 2
) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """A parameter after some steps. The size of gradients differs by column, and their mean is not zero."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape, generator=generator))
    optimizer = cls([parameter], **OPTIONS)
    for _ in range(steps):
        noise = torch.randn(shape, generator=generator)
        parameter.grad = (noise + 0.3) * torch.logspace(-decades, 0, shape[-1])
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("shape", [(100, 70), (64, 64), (3, 4097)], ids=str)
def test_weights_stay_close_to_those_of_adamw(shape: tuple[int, ...]):
    expected, start = trained(torch.optim.AdamW, shape)[0], trained(torch.optim.AdamW, shape, 0)[0]
    found = trained(AdamW8bit, shape)[0]
    assert 0 < ((found - expected).norm() / (expected - start).norm()).item() < 0.06


def test_gradients_of_very_different_size_in_one_group_cause_no_jump():
    """The codes of bitsandbytes and torchao round a small second average to 0 and keep the first one: the weight then
    jumps by a million times the learning rate. Here such a step is too short instead."""
    start, found = (trained(AdamW8bit, (100, 70), steps, decades=6)[0] for steps in (0, 20))
    expected = trained(torch.optim.AdamW, (100, 70), decades=6)[0]
    assert ((found - start).abs().max() <= 2 * (expected - start).abs().max()).item()


def test_small_parameters_keep_fp32_state():
    expected, found = trained(torch.optim.AdamW, (SMALLEST - 1,))[0], trained(AdamW8bit, (SMALLEST - 1,))[0]
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_state_takes_two_bytes_a_parameter():
    parameter, optimizer = trained(AdamW8bit, (64, 256), 1)
    size = sum(value.nbytes for value in optimizer.state[parameter].values() if torch.is_tensor(value))
    assert size == parameter.numel() * (2 + 8 / GROUP)


@pytest.mark.parametrize(
    "values", [adamw8bit._table(signed=True), adamw8bit._table(signed=False)], ids=["signed", "unsigned"]
)
def test_the_table_spans_seven_decades(values: tuple[float, ...]):
    assert len(values) == len(set(values)) == 256
    assert values == tuple(sorted(values))
    assert (values[-1], 0.0 in values) == (1.0, True)
    assert min(value for value in values if value > 0) < 1e-6


@pytest.mark.parametrize("length", [256, 300, 1])
def test_codes_are_the_nearest_entries(length: int):
    table = torch.tensor(adamw8bit._table(signed=True))
    values = torch.randn(length, generator=torch.Generator().manual_seed(0))
    codes, scales = torch.empty(length, dtype=torch.uint8), torch.empty(-(-length // GROUP))
    encode(values, codes, scales, table)
    found = decode(codes, scales, table)
    wide = scales.repeat_interleave(GROUP)[:length].unsqueeze(1)
    best = (values.unsqueeze(1) - table * wide).abs().amin(1)
    assert torch.allclose((found - values).abs(), best, atol=1e-7)
    assert torch.equal(found.abs().max(), values.abs().max())


def test_the_size_of_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    whole = trained(AdamW8bit, (100, 70), 3)[0]
    monkeypatch.setattr(adamw8bit, "_CHUNK", 512)
    assert torch.equal(trained(AdamW8bit, (100, 70), 3)[0], whole)


def test_a_weight_that_is_not_contiguous():
    optimizers, weights = [], [nn.Parameter(torch.ones(80, 64)), nn.Parameter(torch.ones(64, 80).T)]
    for weight in weights:
        optimizers.append(AdamW8bit([weight], **OPTIONS))
        weight.grad = torch.linspace(-1, 1, 5120).view(80, 64)
        optimizers[-1].step()
    assert torch.equal(*weights)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="AdamW8bit cannot take lr=-1"):
        AdamW8bit([nn.Parameter(torch.ones(1))], lr=-1)


def in_8_bits(precision: Precision) -> Precision:
    return Precision(name=precision.name, frozen=precision.frozen, compute=precision.compute, moments="8bit")


def test_a_precision_with_8_bit_moments_replaces_adamw(gpt2, batch, tmp_path):
    parts = partition(gpt2(), num_blocks=3)
    options = {"precision": in_8_bits(BF16_EXACT), "state": KeepOnDisk(tmp_path)}
    optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=1e-3, **options)
    predicted = optimizer.predicted_state_bytes(parts[1])
    with optimizer.visit(parts[1]):
        for step in range(2):
            parts.model(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.state_bytes() == predicted < 5 * parts[1].num_parameters
        kept = optimizer.block_state(1)
    with optimizer.visit(parts[1]):
        again = optimizer.block_state(1)
        assert kept is not None
        assert again is not None
        name = "transformer.h.0.mlp.c_fc.weight"
        assert again[name]["step"] == 2
        assert again[name]["exp_avg"].dtype == torch.uint8
        assert all(torch.equal(again[name][key], kept[name][key]) for key in kept[name] if key != "step")


def test_muon_keeps_its_one_buffer_as_it_is(gpt2):
    parts = partition(gpt2(), num_blocks=3)
    optimizer = BlockOptimizer(parts, torch.optim.Muon, lr=1e-3, precision=in_8_bits(BF16_EXACT))
    assert optimizer.factory.choice[0] is torch.optim.Muon
    assert optimizer.factory.others[0] is AdamW8bit


@pytest.mark.parametrize("cls", [torch.optim.Adagrad, torch.optim.SGD])
def test_moments_of_other_optimizers_in_8_bits_are_refused(cls, gpt2):
    with pytest.raises(ConfigError, match=f"8-bit moments exist for AdamW only, not for {cls.__name__}"):
        BlockOptimizer(partition(gpt2(), num_blocks=3), cls, precision=in_8_bits(BF16_EXACT))


@pytest.mark.skipif(not has_bitsandbytes(), reason="bitsandbytes is not installed")
def test_the_kernels_of_bitsandbytes_read_this_layout_of_state(monkeypatch: pytest.MonkeyPatch):
    expected, start = (trained(torch.optim.AdamW, (100, 70), steps)[0] for steps in (20, 0))

    def by_kernel(weight, gradient, state, group):
        tables = [torch.tensor(values) for values in (adamw8bit._table(signed=True), adamw8bit._table(signed=False))]
        adamw8bit._update_by_kernel(weight, gradient, state, group, tables)

    monkeypatch.setattr(adamw8bit, "_update_8bit", by_kernel)
    found = trained(AdamW8bit, (100, 70))[0]
    assert 0 < ((found - expected).norm() / (expected - start).norm()).item() < 0.06

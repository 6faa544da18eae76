"""Quantized weights take the documented bits, and dequantize to nearly the same values, equal on every path."""

from __future__ import annotations

import pytest
import torch

from blocktrain.optim import quantize_weights as quantize_module
from blocktrain.optim.precision import Format
from blocktrain.optim.quantize_weights import NF4_VALUES, has_bitsandbytes, quantize

SHAPES = [(256, 128), (300, 70), (5, 3), (1, 1), (4, 6, 64)]
FORMATS: list[Format] = ["int8", "nf4"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", [*FORMATS, "bf16"])
def test_shape_and_dtype_come_back(form: Format, shape: tuple[int, ...]):
    weight = torch.randn(shape).bfloat16()
    found = quantize(weight, form).dequantize()
    assert (found.shape, found.dtype, found.is_contiguous()) == (weight.shape, weight.dtype, True)


@pytest.mark.parametrize(("form", "bits", "error"), [("int8", 8.125, 0.007), ("nf4", 4.25, 0.1)])
def test_bits_and_error(form: Format, bits: float, error: float):
    weight = (torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    quantized = quantize(weight, form)
    assert 8 * sum(part.nbytes for part in quantized.parts) / weight.numel() == bits
    assert ((quantized.dequantize() - weight).float().norm() / weight.float().norm()).item() < error


@pytest.mark.parametrize("form", FORMATS)
def test_quantizing_again_loses_nothing(form: Format):
    once = quantize(torch.randn(100, 100).bfloat16(), form).dequantize()
    assert torch.equal(quantize(once, form).dequantize(), once)


@pytest.mark.parametrize("form", FORMATS)
def test_zeros_stay_zeros_and_extremes_keep_their_sign(form: Format):
    weight = torch.zeros(4, 128).bfloat16()
    weight[1, 5], weight[2, 7], weight[3, 9] = 3.0, -3.0, 1e-30
    found = quantize(weight, form).dequantize()
    assert torch.equal(found, weight)


def test_int8_errs_by_half_a_step_and_a_bf16_rounding_at_most():
    weight = torch.randn(64, 128).bfloat16()
    step = weight.float().abs().amax(1, keepdim=True) / 127
    error = (quantize(weight, "int8").dequantize().float() - weight.float()).abs()
    assert (error <= 0.5 * step * 1.01 + weight.float().abs() * 2**-8).all()


def test_nf4_takes_the_nearest_value_of_the_table():
    scale = 2.0  # exact in bf16
    weight = torch.linspace(-scale, scale, 64).view(1, 64)
    table = torch.tensor(NF4_VALUES) * scale
    nearest = table[(weight.view(-1, 1) - table).abs().argmin(1)]
    assert torch.equal(quantize(weight, "nf4").dequantize().view(-1), nearest)


def test_the_size_of_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    quantized = quantize(torch.randn(100, 100).bfloat16(), "nf4")
    whole = quantized.dequantize()
    monkeypatch.setattr(quantize_module, "_CHUNK", 256)
    assert torch.equal(quantized.dequantize(), whole)


@pytest.mark.skipif(not has_bitsandbytes(), reason="bitsandbytes is not installed")
def test_the_kernels_of_bitsandbytes_read_this_layout():
    weight = torch.randn(300, 70).bfloat16()
    quantized = quantize(weight, "nf4")
    codes, scales = quantized.parts
    found = torch.ops.bitsandbytes.dequantize_4bit(
        codes, scales.float(), quantize_module.NF4_GROUP, "nf4", [2 * codes.numel()], torch.bfloat16
    )
    assert torch.equal(found.view(-1)[: weight.numel()].view(weight.shape), quantized.dequantize())

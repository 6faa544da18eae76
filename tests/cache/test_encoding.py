"""The error of each encoding: none, that of bf16, or less than one percent."""

from __future__ import annotations

import pytest
import torch

from blocktrain.cache.encoding import Encoding, EncodingKind


def hidden(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (3, 5, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compute_is_exact(dtype: torch.dtype):
    encoding, values = Encoding("compute"), hidden().to(dtype)
    fields = encoding.encode(values)
    assert list(fields) == ["data"]
    assert fields["data"].dtype == dtype
    assert torch.equal(encoding.decode(fields, dtype), values)
    assert encoding.error(values) == 0.0


def test_bf16_rounds_and_says_by_how_much():
    encoding, values = Encoding("bf16"), hidden()
    back = encoding.decode(encoding.encode(values), torch.float32)
    assert torch.equal(back, values.bfloat16().float())
    assert 0.0005 < encoding.error(values) < 2**-8
    assert encoding.error(values.bfloat16()) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_off_by_less_than_a_percent_and_says_so(dtype: torch.dtype):
    encoding, values = Encoding("int8"), hidden(8, 16, 256).to(dtype)
    fields = encoding.encode(values)
    assert {name: (field.dtype, field.shape[1:]) for name, field in fields.items()} == {
        "data": (torch.int8, (16, 256)),
        "scale": (torch.float32, (16, 1)),
    }
    back = encoding.decode(fields, dtype)
    assert back.dtype == dtype
    lost = back.float() - values.float()
    step = values.float().abs().amax(-1, keepdim=True) / 127
    if dtype == torch.float32:
        assert (lost.abs() <= step * 0.5001).all()
    exact = encoding.decode(fields, torch.float32) - values.float()
    expected = float(exact.norm() / values.float().norm())
    assert encoding.error(values) == pytest.approx(expected, rel=1e-4)
    assert 0.001 < encoding.error(values) < 0.01


def test_int8_has_one_scale_a_token_so_an_outlier_spoils_its_own_token_only():
    encoding, values = Encoding("int8"), hidden(1, 4, 64)
    values[0, 2, 7] = 1000.0
    lost = (encoding.decode(encoding.encode(values), torch.float32) - values).abs()
    assert lost[0, 2].max() > 1
    assert lost[0, 2, 7] < 1e-3
    assert lost[0, [0, 1, 3]].max() < 0.02


@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-38, 3e38, 5.0])
def test_int8_of_a_constant(value: float):
    """Zeros, denormal and huge numbers come back without a NaN; zeros as zeros."""
    encoding, values = Encoding("int8"), torch.full((2, 3, 8), value)
    back = encoding.decode(encoding.encode(values), torch.float32)
    torch.testing.assert_close(back, values, rtol=1e-5, atol=1e-40)
    assert encoding.error(values) < 0.01
    if value == 0:
        assert torch.equal(back, values)


def test_int8_of_images_and_of_pooled_rows():
    for shape in ((2, 16, 8, 8), (5, 64)):
        values = hidden(*shape)
        fields = Encoding("int8").encode(values)
        assert fields["scale"].shape == (*shape[:-1], 1)
        assert Encoding("int8").error(values) < 0.01


@pytest.mark.parametrize("kind", ["compute", "bf16", "int8"])
def test_a_row_is_encoded_the_same_whatever_else_is_in_the_batch(kind: EncodingKind):
    """Lazy and early fills batch rows differently, and must store equal bytes."""
    encoding, values = Encoding(kind), hidden(6, 5, 32)
    together = encoding.encode(values)
    for index in range(6):
        alone = encoding.encode(values[index : index + 1])
        assert all(torch.equal(alone[name][0], together[name][index]) for name in together)

"""A bf16 half and 16 low bits give the fp32 value, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blocktrain.errors import ConfigError
from blocktrain.optim.precision import BF16_EXACT, FP32, join, preset, split, upper_half


def bits(value: Tensor) -> Tensor:
    return value.view(torch.int32)


def of_bits(*patterns: int) -> Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


CORNERS = of_bits(
    0x00000000,  # 0
    0x80000000,  # -0
    0x00000001,  # smallest subnormal
    0x80000001,
    0x007FFFFF,  # largest subnormal: rounding carries into the exponent
    0x00007FFF,  # just below and at half of the smallest bf16 subnormal
    0x00008000,
    0x3F7FFFFF,  # just below 1: rounding carries into the exponent
    0x3FFF8000,  # just below 2, at the tie
    0x3F808000,  # ties with even and odd neighbours
    0x3F818000,
    0xBF808000,
    0x7F7FFFFF,  # largest finite: rounds to infinity
    0xFF7FFFFF,
    0x7F800000,  # infinities
    0xFF800000,
)


def test_corner_cases_are_exact():
    assert torch.equal(bits(join(*split(CORNERS))), bits(CORNERS))
    assert torch.equal(torch.signbit(split(CORNERS)[0][:2]), torch.tensor([False, True]))


def test_every_upper_half_with_every_kind_of_lower_half_is_exact():
    """All 65536 signs, exponents and upper mantissas, NaN left out."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | lower).view(torch.float32)
        values = values[~values.isnan()]
        assert values.numel() >= 65280
        assert torch.equal(bits(join(*split(values))), bits(values))


@pytest.mark.parametrize("seed", range(4))
def test_random_bit_patterns_are_exact(seed: int):
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(-(2**31), 2**31, (2**20,), generator=generator).to(torch.int32)
    values = patterns.view(torch.float32)
    back = join(*split(values))
    nan = values.isnan()
    assert torch.equal(bits(back)[~nan], patterns[~nan])
    assert back[nan].isnan().all()


def test_nan_stays_nan_in_the_model():
    """0x7fffffff is the NaN that GPUs make; rounded up as an integer it would be -0.0, and the fault hidden."""
    values = of_bits(0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFF8000)
    assert values.isnan().all()
    assert upper_half(values).isnan().all()
    assert join(*split(values)).isnan().all()


def test_the_half_is_rounded_to_nearest():
    values = torch.cat([torch.randn(2**18), torch.randn(2**18) * 1e-38, CORNERS])
    tie = (bits(values) & 0xFFFF) == 0x8000
    assert torch.equal(upper_half(values)[~tie], values.to(torch.bfloat16)[~tie])
    upper = bits(values)[tie] >> 16
    assert torch.equal(upper_half(values)[tie].view(torch.int16), (upper + 1).to(torch.int16))  # away from zero
    assert tie.sum() > 0


def test_rounding_has_no_bias():
    values = torch.rand(2**20) + 0.5
    bias = ((upper_half(values).double() - values.double()) / values.double()).mean().item()
    assert abs(bias) < 1e-5  # truncation: -2.8e-3


def test_shapes_and_strides():
    for values in (torch.randn(()), torch.randn(0), torch.randn(3, 4).T, torch.randn(2, 3, 4)[:, ::2]):
        upper, low_bits = split(values)
        assert (upper.dtype, low_bits.dtype) == (torch.bfloat16, torch.int16)
        assert upper.shape == low_bits.shape == values.shape
        assert torch.equal(join(upper, low_bits), values)


def test_splitting_does_not_change_the_master():
    values = torch.randn(100)
    before = values.clone()
    upper, low_bits = split(values)
    join(upper, low_bits).add_(1)
    assert torch.equal(values, before)
    assert torch.equal(join(upper, low_bits), before)


def test_presets_are_found_by_name():
    assert preset("fp32") is FP32
    assert preset("bf16-exact") is BF16_EXACT
    with pytest.raises(ConfigError, match="precision 'bf16_exact' is unknown; did you mean 'bf16-exact'"):
        preset("bf16_exact")

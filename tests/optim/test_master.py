"""Masters exist during a visit: they start from the values at the end of the last one, and collect gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blocktrain.chain.block import Block
from blocktrain.optim.master import LowBits, Masters, lower
from blocktrain.optim.precision import join


@pytest.fixture
def weights() -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.randn(5, 3)), "b": nn.Parameter(torch.randn(7))}


def lowered(weights: dict[str, nn.Parameter]) -> LowBits:
    return {name: lower(weight) for name, weight in weights.items()}


def test_lowering_keeps_the_values(weights: dict[str, nn.Parameter]):
    before = {name: p.detach().clone() for name, p in weights.items()}
    low_bits = lowered(weights)
    for name, p in weights.items():
        assert p.dtype == torch.bfloat16
        assert torch.equal(join(p.data, low_bits[name]), before[name])


def test_lowering_a_bf16_weight_changes_nothing():
    weight = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
    before = weight.detach().clone()
    low_bits = lower(weight)
    assert torch.equal(weight, before)
    assert torch.equal(join(weight.data, low_bits), before.float())


def test_masters_start_where_the_last_ones_ended(weights: dict[str, nn.Parameter]):
    masters = Masters(Block(0, (), weights), lowered(weights))
    with torch.no_grad():
        for master in masters.parameters.values():
            master.add_(1e-6)
    left = {name: master.detach().clone() for name, master in masters.parameters.items()}
    again = Masters(Block(0, (), weights), masters.low_bits(weights))
    assert all(torch.equal(again.parameters[name], value) for name, value in left.items())


def test_without_low_bits_a_master_is_the_weight(weights: dict[str, nn.Parameter]):
    lowered(weights)
    masters = Masters(Block(0, (), weights), {})
    assert all(torch.equal(masters.parameters[name], weight.float()) for name, weight in weights.items())


def test_stepping_writes_the_masters_to_the_model(weights: dict[str, nn.Parameter]):
    masters = Masters(Block(0, (), weights), lowered(weights))
    before = weights["a"].detach().clone()
    weights["b"].sum().backward()
    with masters.stepping(["a", "b"]), torch.no_grad():
        assert masters.parameters["a"].grad is None
        assert masters.parameters["b"].grad is not None
        masters.parameters["b"].fill_(1.0 + 2**-12)
    assert torch.equal(weights["a"], before)
    assert torch.equal(weights["b"], torch.ones(7, dtype=torch.bfloat16))
    left = masters.low_bits(["b"])["b"]
    assert torch.equal(left, torch.full((7,), 2**11, dtype=torch.int16))  # 2^-12 in units of 2^-23
    assert masters.gradients() == {}  # used up


def test_the_first_gradient_stays_in_bf16_and_the_second_makes_the_sum_fp32(weights: dict[str, nn.Parameter]):
    """One micro-batch a step needs no fp32 copy of its gradients."""
    masters = Masters(Block(0, (), weights), lowered(weights))
    (weights["a"].sum() * 2).backward()
    assert weights["a"].grad is None
    assert masters.collected["a"].dtype == torch.bfloat16
    (weights["a"].sum() * 2**-9).backward()  # bf16 would lose it
    assert torch.equal(masters.collected["a"], torch.full((5, 3), 2.0 + 2**-9))


def test_gradients_go_to_the_master_during_a_visit_and_stay_with_the_weight_after_it(weights: dict[str, nn.Parameter]):
    masters = Masters(Block(0, (), weights), lowered(weights))
    (weights["a"].sum() * 2).backward()
    assert torch.equal(masters.gradients()["a"], torch.full((5, 3), 2.0))
    masters.close()
    weights["a"].sum().backward()
    assert weights["a"].grad is not None
    assert masters.gradients() == {}


def test_scaling_is_applied_when_gradients_are_converted_to_fp32(weights: dict[str, nn.Parameter]):
    masters = Masters(Block(0, (), weights), lowered(weights))
    weights["b"].sum().backward()
    assert masters.norm().item() == pytest.approx(7**0.5)
    masters.scale(torch.tensor(1 / 3))
    assert masters.norm().item() == pytest.approx(7**0.5 / 3)
    masters.scale(torch.tensor(2.0))
    masters.scale(torch.tensor(0.5))
    assert masters.norm().item() == pytest.approx(7**0.5 / 3)
    assert masters.collected["b"].dtype == torch.bfloat16
    weights["b"].sum().backward()  # a later gradient is not scaled
    assert torch.equal(masters.gradients()["b"], torch.full((7,), 1.0).mul(torch.tensor(1 / 3)).add(1.0))


def test_a_factor_is_forgotten_with_its_gradients(weights: dict[str, nn.Parameter]):
    """A step that was clipped and then skipped must not scale the next one's gradients."""
    masters = Masters(Block(0, (), weights), lowered(weights))
    weights["b"].sum().backward()
    masters.scale(torch.tensor(1 / 3))
    masters.forget_gradients()
    weights["b"].sum().backward()
    assert masters.norm().item() == pytest.approx(7**0.5)
    assert torch.equal(masters.gradients()["b"], torch.ones(7))


def test_rows_of_fp32_weights_are_updated_in_place(weights: dict[str, nn.Parameter]):
    before = weights["a"].detach().clone()
    masters = Masters(Block(0, (), {"a": weights["a"]}, {"a": range(1, 3)}), {})
    (weights["a"].sum() * 2).backward()
    gradient = masters.gradients()["a"]
    assert torch.equal(gradient, torch.full((2, 3), 2.0))
    assert gradient.untyped_storage().nbytes() == 2 * 3 * 4  # the other rows' gradient is not kept alive
    with masters.stepping(["a"]), torch.no_grad():
        masters.parameters["a"].add_(1)
    assert masters.low_bits(["a"]) == {}
    assert torch.equal(weights["a"][1:3], before[1:3] + 1)
    assert torch.equal(weights["a"][[0, 3, 4]], before[[0, 3, 4]])

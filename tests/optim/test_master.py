"""Masters live for a visit: they begin where the last one ended and leave nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blocktrain.blocks.block import Block
from blocktrain.optim.master import Masters, lower
from blocktrain.optim.precision import join


@pytest.fixture
def weights() -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.randn(5, 3)), "b": nn.Parameter(torch.randn(7))}


def test_lowering_keeps_the_values(weights: dict[str, nn.Parameter]):
    before = {name: p.detach().clone() for name, p in weights.items()}
    remainders = lower(weights)
    for name, p in weights.items():
        assert p.dtype == torch.bfloat16
        assert torch.equal(join(p.data, remainders[name]), before[name])


def test_lowering_what_is_lower_already_changes_nothing():
    weight = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
    before = weight.detach().clone()
    remainders = lower({"w": weight})
    assert torch.equal(weight, before)
    assert torch.equal(join(weight.data, remainders["w"]), before.float())


def test_masters_begin_where_they_ended(weights: dict[str, nn.Parameter]):
    masters = Masters(Block(0, (), weights), lower(weights))
    with torch.no_grad():
        for master in masters.parameters.values():
            master.add_(1e-6)
    left = {name: master.detach().clone() for name, master in masters.parameters.items()}
    again = Masters(Block(0, (), weights), masters.close())
    assert all(torch.equal(again.parameters[name], value) for name, value in left.items())


def test_the_model_follows_its_masters(weights: dict[str, nn.Parameter]):
    masters = Masters(Block(0, (), weights), lower(weights))
    with torch.no_grad():
        masters.parameters["b"].fill_(1.0 + 2**-12)
    masters.write_weights()
    assert torch.equal(weights["b"], torch.ones(7, dtype=torch.bfloat16))
    assert torch.equal(masters.remainders()["b"], torch.full((7,), 2**11, dtype=torch.int16))  # 2^-12 in units of 2^-23


def test_gradients_go_to_the_master_during_a_visit_and_stay_after_it(weights: dict[str, nn.Parameter]):
    masters = Masters(Block(0, (), weights), lower(weights))
    (weights["a"].sum() * 2).backward()
    gradient = masters.parameters["a"].grad
    assert gradient is not None
    assert torch.equal(gradient, torch.full((5, 3), 2.0))
    assert weights["a"].grad is None
    masters.close()
    weights["a"].sum().backward()
    assert weights["a"].grad is not None
    assert torch.equal(gradient, torch.full((5, 3), 2.0))


def test_rows_of_fp32_weights_are_moved_in_place(weights: dict[str, nn.Parameter]):
    before = weights["a"].detach().clone()
    masters = Masters(Block(0, (), {"a": weights["a"]}, {"a": range(1, 3)}), {})
    (weights["a"].sum() * 2).backward()
    gradient = masters.parameters["a"].grad
    assert gradient is not None
    assert torch.equal(gradient, torch.full((2, 3), 2.0))
    assert gradient.untyped_storage().nbytes() == 2 * 3 * 4  # the other rows' gradient is not kept alive
    with torch.no_grad():
        masters.parameters["a"].add_(1)
    masters.write_weights()
    assert masters.close() == {}
    assert torch.equal(weights["a"][1:3], before[1:3] + 1)
    assert torch.equal(weights["a"][[0, 3, 4]], before[[0, 3, 4]])

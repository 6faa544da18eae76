"""A chain covers every parameter once and says what is wrong where it does not."""

from __future__ import annotations

import pytest
from torch import nn

from blocktrain.chain.chain import Chain
from blocktrain.errors import PartitionError


def tied_model() -> nn.Module:
    model = nn.ModuleDict({"wte": nn.Embedding(8, 4), "body": nn.Linear(4, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["wte"].weight
    return model


def test_a_tied_parameter_belongs_to_the_first_layer_that_uses_it():
    chain = Chain.of_modules(tied_model(), {"embedding": ["wte"], "body": ["body"], "head": ["head"]})
    assert [list(mine) for mine in chain.owned] == [["wte.weight"], ["body.weight", "body.bias"], []]
    assert chain.owned[0]["wte.weight"] is chain.model.get_parameter("head.weight")


def test_forward_order_decides_who_owns_not_registration_order():
    chain = Chain.of_modules(tied_model(), {"first": ["head"], "body": ["body"], "last": ["wte"]})
    assert list(chain.owned[0]) == ["head.weight"]
    assert chain.owned[0]["head.weight"] is chain.model.get_parameter("wte.weight")
    assert chain.owned[2] == {}


def test_a_parameter_outside_all_layers_is_named():
    with pytest.raises(PartitionError, match=r"'body\.weight' of ModuleDict belongs to no layer of \['all'\]"):
        Chain.of_modules(tied_model(), {"all": ["wte", "head"]})


def test_an_unknown_module_path_is_named():
    with pytest.raises(PartitionError, match="layer 'all': ModuleDict has no module 'bodies'"):
        Chain.of_modules(tied_model(), {"all": ["bodies"]})

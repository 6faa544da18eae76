"""Every kind of model reaches the code that knows its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from blocktrain.chain.discovery import find_chain
from blocktrain.chain.resnet import resnet
from blocktrain.errors import PartitionError


def paths(model: nn.Module, **options) -> dict[str, list[str]]:
    return {layer.name: list(layer.modules) for layer in find_chain(model, **options).layers}


def test_sequential_children_without_parameters_join_the_layer_before_or_the_first():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 2))
    assert paths(model) == {"1": ["0", "1", "2", "3"], "4": ["4"]}


def test_a_sequential_child_used_twice_keeps_both_places():
    shared = nn.Linear(4, 4)
    chain = find_chain(nn.Sequential(shared, nn.ReLU(), shared))
    assert [list(layer.modules) for layer in chain.layers] == [["0", "1"], ["2"]]
    assert [list(mine) for mine in chain.owned] == [["0.weight", "0.bias"], []]


def test_sequential_without_parameters():
    with pytest.raises(PartitionError, match="nothing to train"):
        find_chain(nn.Sequential(nn.ReLU()))


def test_resnet_is_cut_at_its_residual_units():
    assert paths(resnet(8)) == {
        "stem": ["conv1", "bn1"],
        "layer1.0": ["layer1.0"],
        "layer2.0": ["layer2.0"],
        "layer3.0": ["layer3.0"],
        "head": ["linear"],
    }


def test_named_layers_come_before_what_the_model_is():
    assert paths(resnet(8), layers={"body": ["conv1", "bn1", "layer1", "layer2", "layer3"], "head": ["linear"]}) == {
        "body": ["conv1", "bn1", "layer1", "layer2", "layer3"],
        "head": ["linear"],
    }


def test_an_unknown_model_is_refused_with_the_way_out():
    class Unknown(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

    with pytest.raises(PartitionError, match=r"layers of Unknown are not known.*layers=\{"):
        find_chain(Unknown())


def test_a_compiled_model_is_refused_with_the_way_out():
    with pytest.raises(PartitionError, match=r"result of torch\.compile.*model\._orig_mod"):
        find_chain(torch.compile(resnet(8), backend="eager"))  # pyright: ignore[reportArgumentType]


def test_a_quantized_model_is_refused_with_the_way_out():
    """As transformers marks a model that it has loaded through bitsandbytes."""
    model: Any = resnet(8)
    model.is_quantized, model.quantization_method = True, "bitsandbytes"
    with pytest.raises(PartitionError, match=r"quantized \(bitsandbytes\).*without a quantization_config"):
        find_chain(model)

"""Which kernels run where. Liger's kernels need a GPU and are not run here."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from blocktrain.errors import ConfigError
from blocktrain.modules.kernels import apply_liger, choose_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[False, True])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    spec = importlib.machinery.ModuleSpec("liger_kernel", None) if request.param else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return request.param


def test_auto_takes_liger_where_it_can_run(installed: bool):
    assert choose_kernels("auto", CPU) == choose_kernels("torch", CUDA) == "torch"
    assert choose_kernels("auto", CUDA) == ("liger" if installed else "torch")


def test_liger_is_refused_where_it_cannot_run(installed: bool):
    with pytest.raises(ConfigError, match="needs a CUDA device, not 'cpu'"):
        choose_kernels("liger", CPU)
    if installed:
        assert choose_kernels("liger", CUDA) == "liger"
    else:
        with pytest.raises(ConfigError, match="pip install liger-kernel"):
            choose_kernels("liger", CUDA)


def test_liger_replaces_modules_of_the_model_and_no_function_of_the_process(monkeypatch: pytest.MonkeyPatch):
    module, seen = ModuleType("liger_kernel.transformers"), []
    vars(module)["_apply_liger_kernel_to_instance"] = lambda **given: seen.append(given)
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    model: Any = nn.Linear(1, 1)
    apply_liger(model)
    assert seen == [{"model": model, "rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}]

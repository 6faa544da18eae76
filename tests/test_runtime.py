"""Devices, seeds, and what a run records of its machine."""

from __future__ import annotations

import json

import pytest
import torch

from blocktrain.errors import ConfigError
from blocktrain.runtime import environment, peak_memory_bytes, pick_device, seed_everything, synchronize


def drawn(*key: int) -> torch.Tensor:
    seed_everything(*key)
    return torch.rand(4)


def test_random_numbers_are_a_function_of_seed_and_key():
    assert torch.equal(drawn(3, 7, 0), drawn(3, 7, 0))
    draws = [drawn(*key) for key in ((3, 7, 0), (3, 7, 1), (3, 8, 0), (4, 7, 0), (3,), (3, 7))]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)


def test_the_smallest_and_the_largest_seed():
    drawn(2**64)
    drawn(0)


def test_a_device_is_found_by_name_and_by_default():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", str(torch.accelerator.current_accelerator()))


@pytest.mark.parametrize("name", ["gpu", "cuda:99", ""])
def test_a_missing_device_is_refused(name: str):
    with pytest.raises(ConfigError, match=rf"device '{name}' cannot be used here \(.+\); try 'auto' or 'cpu'"):
        pick_device(name)


def test_peak_memory_includes_what_was_allocated():
    device = torch.device("cpu")
    synchronize(device)
    allocated = torch.ones(2**24)  # 64 MiB
    assert 2**40 > peak_memory_bytes(device) > allocated.nbytes


def test_the_environment_can_be_recorded():
    recorded = json.loads(json.dumps(environment(torch.device("cpu"))))
    assert recorded["torch"] == torch.__version__
    assert recorded["device"] == "cpu"
    assert recorded["processor"]
    assert recorded["commit"] is None or len(recorded["commit"].rstrip("+")) == 40

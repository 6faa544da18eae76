"""What `finetune` chooses, for machines that are not here and models that are not loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blocktrain.errors import ConfigError
from blocktrain.plan.fit import Capacity, Request
from blocktrain.plan.hardware import GIB, achievable, load_hardware
from blocktrain.plan.presets import find_model
from blocktrain.train.auto_micro_batch import SHARE
from blocktrain.train.finetune import Machine, Method, choose, model_spec

from ..tiny_models import pretrained_folder

HARDWARE = load_hardware()
RATES = achievable(HARDWARE.card("rtx4090"), HARDWARE)


def machine(free_gib: float, *, host_gib: float = 64, is_shared: bool = False) -> Machine:
    return Machine(name="card", free=free_gib * GIB, host=host_gib * GIB, is_shared=is_shared, rates=RATES)


def request(there: Machine, model: str = "llama-2-7b", **choices: object) -> Request:
    capacity = Capacity(card=SHARE * there.free, host=SHARE * there.host, disk=1000 * GIB, fragmentation=0.05)
    given = {"tokens": 10**6, "seq": 512, "rows": 16, "cache": "off"} | choices
    return Request(spec=find_model(model), card="card", cards=1, rates=RATES, capacity=capacity, **given)  # pyright: ignore[reportArgumentType]


def test_a_7b_model_on_a_card_of_24_gb() -> None:
    """As exact as on a large card, in more blocks; everything but the active block stays frozen on the card."""
    there = machine(24, host_gib=128)
    best = choose(request(there), there)
    assert (best.layout.precision.name, best.layout.blocks) == ("bf16-exact", 24)
    assert (best.layout.frozen, best.layout.moments, best.layout.state) == ("device", "fp32", "host")
    assert 12 * GIB < best.memory.peak < SHARE * 24 * GIB
    less = machine(24, host_gib=64)
    layout = choose(request(less), less).layout  # the host has no room for all moments in fp32
    assert (layout.precision.name, layout.blocks, layout.moments) == ("bf16-exact", 12, "8bit")


@pytest.mark.parametrize(
    ("free_gib", "method", "precision", "blocks"),
    [(400, "blocks", "bf16-exact", 3), (400, "full", "bf16-exact", 1), (10, "blocks", "nf4", 24)],
)
def test_precision_and_blocks_follow_from_the_memory(
    free_gib: int, method: Method, precision: str, blocks: int
) -> None:
    there = machine(free_gib)
    best = choose(request(there), there, method)
    assert (best.layout.precision.name, best.layout.blocks) == (precision, blocks)


def test_a_cpu_keeps_moments_in_the_memory_that_it_trains_in() -> None:
    there = machine(6, host_gib=6, is_shared=True)
    best = choose(request(there, "gpt2-medium"), there)
    assert best.layout.precision.name == "fp32"
    assert best.memory.peak + best.memory.host_bytes <= SHARE * 6 * GIB
    assert (
        choose(request(machine(6)), machine(6, is_shared=False)).memory.peak <= SHARE * 6 * GIB
    )  # streamed, or in nf4


def test_what_the_user_sets_is_kept() -> None:
    there = machine(80)
    layout = choose(request(there, blocks=8, precision="int8", frozen="host", moments="8bit"), there).layout
    assert (layout.blocks, layout.precision.name, layout.frozen, layout.moments) == (8, "int8", "host", "8bit")


@pytest.mark.parametrize(
    ("free_gib", "method", "message"),
    [
        (1, "blocks", r"'llama-2-70b' does not fit: it takes at least .* GiB of .*; choose a smaller model"),
        (80, "full", r"'llama-2-70b' does not fit: .* of device memory, mostly for .*; leave out --method full"),
    ],
)
def test_what_does_not_fit_is_said(free_gib: int, method: Method, message: str) -> None:
    there = machine(free_gib)
    with pytest.raises(ConfigError, match=message):
        choose(request(there, "llama-2-70b"), there, method)
    with pytest.raises(ConfigError, match=r"has 34 layers, so it cannot be trained in 40 blocks"):
        choose(request(machine(80), blocks=40), machine(80))


def test_the_shape_comes_from_the_configuration_alone(tmp_path: Path) -> None:
    folder = pretrained_folder(tmp_path / "bert", "bert")
    (folder / "model.safetensors").unlink()
    assert model_spec(str(folder), classifies=True).layers == 4
    with pytest.raises(ConfigError, match=r"is an encoder, whose tokens see those that they should predict"):
        model_spec(str(folder))
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere/at/all"):
        with pytest.raises(ConfigError, match=r"is no folder with a config\.json"):
            model_spec(str(tmp_path / name))
    (folder / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(ConfigError, match=r"model_type 'nothing' cannot be planned"):
        model_spec(str(folder))

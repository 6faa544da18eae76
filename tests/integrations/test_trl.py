"""TRL's trainers in blocks: the same mixin before their classes, and a resumed run ends as a whole one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ..run_events import Crash
from .conftest import CrashAt

pytest.importorskip("trl")
pytest.importorskip("peft")

from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer  # pyright: ignore[reportMissingImports]
from trl_trainers.trl_trainers import learned, make, train

import blocktrain as bt
from blocktrain.integrations.hf import Blocks
from blocktrain.optim.precision import Precision

# TRL itself still uses the old names of transformers' `activation_checkpointing`.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated:FutureWarning"
)

TRAINERS = pytest.mark.parametrize("cls", [SFTTrainer, DPOTrainer, GRPOTrainer, RewardTrainer])


@TRAINERS
@pytest.mark.parametrize("kind", ["own head", "LoRA"])
def test_one_block_is_the_plain_trainer(cls: Any, kind: str, tmp_path: Path) -> None:
    """What is logged, too. GRPO took its training for evaluation, because the model was not in train mode; adapters
    were refused, because TRL replaces the forward pass of the model inside of PEFT's."""
    plain = make(cls, tmp_path, None, kind=kind, max_steps=6)
    expected = train(plain)
    ours = make(cls, tmp_path, Blocks(count=1), kind=kind, max_steps=6)  # which seeds what GRPO samples
    found = train(ours)
    for name, value in expected["weights"].items():
        assert torch.equal(found["weights"][name], value), name
    clocks = ("time", "runtime", "second")
    for theirs, mine in zip(plain.state.log_history, ours.state.log_history, strict=True):
        assert theirs.keys() == mine.keys()
        for key in theirs:
            assert any(word in key for word in clocks) or theirs[key] == pytest.approx(mine[key], rel=1e-6), key


@TRAINERS
@pytest.mark.parametrize("precision", [bt.FP32, bt.BF16_EXACT, bt.INT8, bt.NF4], ids=lambda each: each.name)
def test_three_blocks_learn_in_each_precision(cls: Any, precision: Precision, tmp_path: Path) -> None:
    """With quantized weights the loss was 0 and the saved weights were NaN: TRL reads those of the head itself."""
    found = train(make(cls, tmp_path, Blocks(count=3, precision=precision)))
    assert found["finite"]
    assert found["unchanged"] == []
    assert learned(found)


@TRAINERS
def test_only_adapters_are_trained(cls: Any, tmp_path: Path) -> None:
    trainer = make(cls, tmp_path, Blocks(count=3), kind="LoRA", max_steps=6)
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    found = train(trainer)
    assert len(trainer.visiting.blocks.partition) == 3
    assert {name for name in before if not torch.equal(found["weights"][name], before[name])} == trained


def test_an_output_projection_in_fp32(tmp_path: Path) -> None:
    """TRL replaces the forward pass of the layer, and frozen weights that are quantized wrap it."""
    found = train(make(GRPOTrainer, tmp_path, Blocks(count=3, precision=bt.INT8), cast_lm_head_to_fp32=True))
    assert found["finite"]
    assert learned(found)


RESUMED: dict[str, Any] = {
    "SFT": (SFTTrainer, {}),
    "SFT, activation checkpointing": (SFTTrainer, {"gradient_checkpointing": True}),
    "DPO": (DPOTrainer, {}),
    "DPO, reference computed first": (DPOTrainer, {"precompute_ref_log_probs": True}),
}


@pytest.mark.parametrize(("cls", "settings"), RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_ends_as_a_whole_one(cls: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    """All blocks move, one at a time; and killed at step 6, resumed from step 5, the run ends as a whole one."""
    blocks = Blocks(count=3, visit=bt.Duration.steps(3), state=bt.KeepOnHost())
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 5, **settings}
    whole = make(cls, tmp_path / "whole", blocks, **settings)
    found = train(whole)
    assert (whole.visiting.visit.index, found["unchanged"]) == (2, [])
    killed = make(cls, tmp_path / "killed", blocks, **settings)
    killed.add_callback(CrashAt(6))
    with pytest.raises(Crash):
        killed.train()
    resumed = make(cls, tmp_path / "killed", blocks, **settings)
    resumed.train(resume_from_checkpoint=True)
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, found["weights"][name]), name
    assert resumed.visiting.state_dict()["blocks"]["changed_at"] == whole.visiting.state_dict()["blocks"]["changed_at"]
    if cls is DPOTrainer:
        losses = [logged["loss"] for logged in whole.state.log_history if "loss" in logged]
        assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # ln 2: the reference is the model before its first step


@pytest.mark.slow
def test_a_script_ends_without_a_word(tmp_path: Path) -> None:
    """After its training, and after an exception in it, with the trainer alive: a visit that was open printed one."""
    script = (
        "import sys, trl, blocktrain as bt\n"
        "from pathlib import Path\n"
        "from trl_trainers.trl_trainers import Blocks, make\n"
        "trainer = make(trl.SFTTrainer, Path(sys.argv[1]), Blocks(count=3, precision=bt.INT8), max_steps=4)\n"
        "trainer.train()\n"
        "trainer.visiting.resume()\n"
        "print('ended', file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.rpartition("ended\n")[2]) == (0, "")
    assert "ended\n" in ended.stderr

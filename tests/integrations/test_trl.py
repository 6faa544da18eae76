"""TRL's trainers in blocks: the same mixin before their classes, and a resumed run ends as a whole one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ..run_events import Crash
from .conftest import CrashAt

pytest.importorskip("trl")
pytest.importorskip("datasets")

from datasets import Dataset  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

import blocktrain as bt
from blocktrain.integrations.hf import Blocks, BlockTrainerMixin

# TRL itself still uses the old names of transformers' `activation_checkpointing`.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated:FutureWarning"
)

WORDS = ["<eos>", "<pad>", *"abcdefghijklmnopqrstuvwxyz"]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 8,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 5,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "max_length": 12,
}


def blocks() -> Blocks:
    return Blocks(count=3, visit=bt.Duration.steps(3), state=bt.KeepOnHost())


class BlockSFTTrainer(BlockTrainerMixin, SFTTrainer):
    pass


class BlockDPOTrainer(BlockTrainerMixin, DPOTrainer):
    pass


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


Make = Callable[..., Any]  # (output folder, **more arguments) -> a trainer


def check(make: Make, folder: Path) -> Any:
    """All blocks move, one at a time; and killed at step 6, resumed from step 5, the run ends as a whole one."""
    whole = make(folder / "whole")
    before = {name: value.clone() for name, value in whole.model.state_dict().items()}
    whole.train()
    assert whole.visiting.visit.index == 2
    after = whole.model.state_dict()
    assert sum(not torch.equal(after[name], before[name]) for name in before) > 0.9 * len(before)
    with pytest.raises(Crash):
        make(folder / "killed", callbacks=[CrashAt(6)]).train()
    resumed = make(folder / "killed")
    resumed.train(resume_from_checkpoint=True)
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, after[name]), name
    assert resumed.visiting.state_dict()["blocks"]["changed_at"] == whole.visiting.state_dict()["blocks"]["changed_at"]
    return whole


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_sft(model, tokenizer, tmp_path: Path, gradient_checkpointing: bool) -> None:
    rows = Dataset.from_dict({"text": [WORDS[2 + i] + "bcdefgh" + WORDS[3 + i] for i in range(20)]})

    def make(folder: Path, **more: Any) -> Any:
        config = SFTConfig(str(folder), gradient_checkpointing=gradient_checkpointing, **SETTINGS)
        return BlockSFTTrainer(model(), config, train_dataset=rows, processing_class=tokenizer, blocks=blocks(), **more)

    check(make, tmp_path)


@pytest.mark.parametrize("precomputed", [False, True])
def test_dpo(model, tokenizer, tmp_path: Path, precomputed: bool) -> None:
    letters = WORDS[2:22]
    rows = Dataset.from_dict(
        {"prompt": letters, "chosen": ["abc" + x for x in letters], "rejected": ["xyz" + x for x in letters]}
    )

    def make(folder: Path, **more: Any) -> Any:
        config = DPOConfig(str(folder), precompute_ref_log_probs=precomputed, **SETTINGS)
        return BlockDPOTrainer(
            model(),
            model(),  # the reference
            config,
            train_dataset=rows,
            processing_class=tokenizer,
            blocks=blocks(),
            **more,
        )

    whole = check(make, tmp_path)
    losses = [logged["loss"] for logged in whole.state.log_history if "loss" in logged]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # ln 2: the reference is the model before its first step
    assert min(losses) < 0.6

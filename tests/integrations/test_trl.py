"""TRL's trainers in blocks: the same mixin before their classes, and a resumed run ends as a whole one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import blocktrain as bt
from blocktrain.integrations.hf import Blocks, BlockTrainerMixin

# TRL itself still uses the old names of transformers' `activation_checkpointing`.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing(_disable)?` is deprecated:FutureWarning")

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


class BlockSFTTrainer(BlockTrainerMixin, SFTTrainer):
    pass


class BlockDPOTrainer(BlockTrainerMixin, DPOTrainer):
    pass


class Crash(BaseException):
    """As sudden as the power going."""


class CrashAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            raise Crash


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


def train(cls: Any, config: Any, model: Any, rows: Dataset, tokenizer: Any, *, resume: bool = False, **more: Any) -> Any:
    trainer = cls(
        model=model,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        blocks=Blocks(count=3, visit=bt.Duration.steps(3), state=bt.KeepOnHost()),
        **more,
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def check(
    cls: Any,
    config_class: Any,
    model: Any,
    rows: Dataset,
    tokenizer: Any,
    folder: Path,
    *,
    more: Callable[[], dict[str, Any]] = dict,
    **settings: Any,
) -> Any:
    """All blocks move, one at a time; and killed at step 6, resumed from step 5, the run ends as a whole one."""

    def config(name: str) -> Any:
        return config_class(output_dir=str(folder / name), **{**SETTINGS, **settings})

    before = model().state_dict()
    whole = train(cls, config("whole"), model(), rows, tokenizer, **more())
    assert whole.visiting.visit.index == 2
    after = whole.model.state_dict()
    assert sum(not torch.equal(after[name], before[name]) for name in before) > 0.9 * len(before)
    with pytest.raises(Crash):
        train(cls, config("killed"), model(), rows, tokenizer, callbacks=[CrashAt()], **more())
    resumed = train(cls, config("killed"), model(), rows, tokenizer, resume=True, **more())
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, after[name]), name
    assert resumed.visiting.state_dict()["blocks"]["changed_at"] == whole.visiting.state_dict()["blocks"]["changed_at"]
    return whole


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_sft(model, tokenizer, tmp_path: Path, gradient_checkpointing: bool) -> None:
    rows = Dataset.from_dict({"text": [WORDS[2 + i] + "bcdefgh" + WORDS[3 + i] for i in range(20)]})
    settings = {"gradient_checkpointing": gradient_checkpointing}
    check(BlockSFTTrainer, SFTConfig, model, rows, tokenizer, tmp_path, **settings)


@pytest.mark.parametrize("precomputed", [False, True])
def test_dpo(model, tokenizer, tmp_path: Path, precomputed: bool) -> None:
    letters = WORDS[2:22]
    rows = Dataset.from_dict(
        {"prompt": letters, "chosen": ["abc" + x for x in letters], "rejected": ["xyz" + x for x in letters]}
    )
    settings = {"precompute_ref_log_probs": precomputed}
    reference = lambda: {"ref_model": model()}  # noqa: E731 - where the model has no name, TRL wants it given
    whole = check(BlockDPOTrainer, DPOConfig, model, rows, tokenizer, tmp_path, more=reference, **settings)
    losses = [logged["loss"] for logged in whole.state.log_history if "loss" in logged]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # ln 2: the reference is the model before its first step
    assert min(losses) < 0.6

"""BlockTrainer and TRL in several processes: as one process with all rows, and only the active block's gradients are
sent. The file imports no other test file, because each process loads it alone."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import blocktrain as bt
from blocktrain.errors import NonFiniteError
from blocktrain.testing import run_distributed

pytest.importorskip("accelerate")

from blocktrain.integrations.hf import Blocks, BlockTrainer

pytestmark = [  # each test starts processes; TRL still uses the old names of transformers' `activation_checkpointing`
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
]

TOKENS, VOCABULARY = 12, 40


def settings(out: Path, size: int) -> dict[str, Any]:
    """Arguments of each of `size` processes: 4 rows a micro-batch together. They are members of a process group, which
    accelerate finds by these variables."""
    if size > 1:
        rank = str(dist.get_rank())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return {
        "output_dir": str(out),
        "per_device_train_batch_size": 4 // size,
        "gradient_accumulation_steps": 2,
        "max_steps": 9,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": 5,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }


def make(out: Path, size: int, *, precision: bt.Precision | None = None, scale: float = 1.0) -> BlockTrainer:
    """A trainer of one of `size` processes. scale: of its initial weights."""
    torch.manual_seed(0)
    net = GPT2LMHeadModel(
        GPT2Config(
            n_layer=4,
            n_embd=16,
            n_head=2,
            n_positions=TOKENS,
            vocab_size=VOCABULARY,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
        )
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    tokens = (torch.arange(32)[:, None] * 7 + torch.arange(TOKENS)) % VOCABULARY
    return BlockTrainer(
        net,
        TrainingArguments(**settings(out, size)),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        blocks=Blocks(count=3, precision=precision),
    )


def outcome(trainer: Any, **how: Any) -> dict[str, Any]:
    """Train, and say what came of it."""
    net = trainer.model
    trainer.train(**how)
    assert trainer.model_wrapped is net  # not DistributedDataParallel
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
    history = trainer.state.log_history
    return {
        "losses": [logged["loss"] for logged in history if "loss" in logged],
        "norms": [logged["grad_norm"] for logged in history if "grad_norm" in logged],
        "weights": {name: value.float().numpy() for name, value in net.state_dict().items()},
        "bytes": trainer.visiting.ranks.all_reduced_bytes,
        "blocks": [block.num_parameters for block in trainer.visiting.blocks.partition],
    }


def from_weights_of_its_own(out: Path) -> dict[str, Any]:
    return outcome(make(out, 2, scale=1.0 + dist.get_rank()))


def in_precision(out: Path, precision: bt.Precision | None, resume: bool) -> dict[str, Any]:
    return outcome(make(out, 2, precision=precision), resume_from_checkpoint=resume)


def to_nan_on_rank_1(out: Path) -> None:
    trainer = make(out, 2)
    if dist.get_rank() == 1:
        compute_loss: Any = trainer.compute_loss
        trainer.compute_loss = lambda *args, **kwargs: compute_loss(*args, **kwargs) * torch.nan
    try:
        trainer.train()
    except NonFiniteError as error:
        assert "the loss is nan on rank 1 in step 1" in str(error)  # noqa: PT017 - in a process without pytest
        return
    raise AssertionError("the run went on")


def fine_tuned(out: Path, size: int) -> dict[str, Any]:
    """TRL's SFTTrainer in blocks."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "experiments"))
    import trl  # pyright: ignore[reportMissingImports]
    from trl_trainers import trl_trainers

    arguments = {key: value for key, value in settings(out, size).items() if key != "output_dir"}
    return outcome(trl_trainers.make(trl.SFTTrainer, out, Blocks(count=3), **arguments))


def assert_as_alone(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for found in ranks:
        assert found["losses"] == pytest.approx(alone["losses"], abs=5e-6)
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        sent = found["bytes"] - 4 * 3 * sum(found["blocks"])
        assert 0 < sent < 2000  # beyond 3 fp32 gradients of each block: which of them exist
    assert all((ranks[1]["weights"][name] == value).all() for name, value in ranks[0]["weights"].items())


def test_two_processes_are_as_one_and_send_the_active_block_only(tmp_path: Path) -> None:
    """Several processes were refused, because DistributedDataParallel keeps reducing the gradients of the first block.
    They start from the weights of rank 0, as with it."""
    alone = outcome(make(tmp_path / "alone", 1))
    assert_as_alone(run_distributed(from_weights_of_its_own, 2, tmp_path / "two"), alone)


@pytest.mark.parametrize("precision", [None, bt.BF16_EXACT, bt.NF4], ids=lambda one: one.name if one else "")
def test_two_processes_resume(tmp_path: Path, precision: bt.Precision | None) -> None:
    """From the checkpoint of step 5 of 9, in the middle of the second visit of three steps."""
    whole = run_distributed(in_precision, 2, tmp_path, precision, False)
    shutil.rmtree(tmp_path / "checkpoint-9")
    resumed = run_distributed(in_precision, 2, tmp_path, precision, True)
    for first, second in zip(whole, resumed, strict=True):
        assert first["losses"] == second["losses"]
        assert all((first["weights"][name] == value).all() for name, value in second["weights"].items())


def test_every_process_ends_at_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    """Else rank 0 would take the step with the gradients of the others, and save what becomes of the weights."""
    run_distributed(to_nan_on_rank_1, 2, tmp_path)


def test_trl_in_two_processes_is_as_in_one(tmp_path: Path) -> None:
    for name in ("trl", "peft"):
        pytest.importorskip(name)
    alone = fine_tuned(tmp_path / "alone", 1)
    assert_as_alone(run_distributed(fine_tuned, 2, tmp_path / "two", 2), alone)

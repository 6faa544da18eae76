"""What `[memory]` promises of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import blocktrain as bt
from blocktrain.errors import ConfigError
from blocktrain.train.context import build

from ..run_events import events_of

PLAIN = ["model.config.attn_pdrop=0.0", "sampling.scope=sweep", "sampling.rate=0.02", "schedule.visit=4 steps"]


def losses(run: Path) -> list[float]:
    return [event["loss"] for kind in ("step", "evaluation") for event in events_of(run, kind)]


def test_a_checkpointed_run_is_the_same_run_and_says_what_it_costs(tiny, tmp_path: Path) -> None:
    """With dropout in the active block, and hidden states from a prefix cache; losses bit for bit."""
    settings = [*PLAIN, "prefix.store=host", "memory.checkpointing=layers"]
    bt.run(tiny(*PLAIN, "prefix.store=host"), tmp_path / "plain")
    bt.run(tiny(*settings, "memory.boundaries=host"), tmp_path / "checkpointed")
    assert losses(tmp_path / "checkpointed") == losses(tmp_path / "plain")
    plain, checkpointed = (events_of(tmp_path / name, "cost")[0] for name in ("plain", "checkpointed"))
    for before, after in zip(plain["memory"]["blocks"], checkpointed["memory"]["blocks"], strict=True):
        assert after["activations"] < before["activations"]
    for counted, theory, before in zip(
        checkpointed["flops"]["blocks"], checkpointed["flops"]["theory_blocks"], plain["flops"]["blocks"], strict=True
    ):
        assert counted > before
        assert theory == pytest.approx(counted, rel=0.02)
    assert checkpointed["flops"]["forward_layers"] == plain["flops"]["forward_layers"]


@pytest.mark.usefixtures("uncounted")
def test_a_run_with_a_chunked_loss_has_the_same_losses_up_to_rounding(tiny, tmp_path: Path) -> None:
    """SGD: Adam would make steps of full size from gradients that are zero but for rounding."""
    settings = ["optimizer.name=SGD", "batch.micro_rows=2", "prefix.store=host", *PLAIN]
    bt.run(tiny(*settings), tmp_path / "whole")
    bt.run(tiny(*settings, "memory.loss_chunk=7"), tmp_path / "chunked")
    assert losses(tmp_path / "chunked") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert losses(tmp_path / "chunked") != losses(tmp_path / "whole")
    caches = events_of(tmp_path / "chunked", "cache")
    assert any(event.get("place") == "host" for event in caches)  # the cut's own check had logits to compare


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("memory.boundaries=host", "set checkpointing = 'layers'"),
        ("memory.loss_chunk=0", "at least 1 token"),
        ("memory.kernels=liger", "needs a CUDA device"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(tiny, tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bt.run(tiny(setting), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_that_uses_its_logits_otherwise_is_refused(tiny, tmp_path: Path, monkeypatch) -> None:
    from transformers import GPT2LMHeadModel

    forward = GPT2LMHeadModel.forward

    def sorted_logits(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = forward(self, *args, **kwargs)
        output.logits = torch.sort(output.logits).values
        return output

    monkeypatch.setattr(GPT2LMHeadModel, "forward", sorted_logits)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel cannot be computed in chunks: 'sort' needs logits"):
        build(tiny("memory.loss_chunk=7"), tmp_path)

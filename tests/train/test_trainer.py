"""What the loop does with a configuration: stopping, evaluating, accumulating, and failing well."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor
from transformers import GPT2LMHeadModel

import blocktrain as bt
from blocktrain.errors import NonFiniteError
from blocktrain.train.blocks_train_module import BlocksModule
from blocktrain.train.checkpoint import checkpoints
from blocktrain.train.context import build

from ..run_events import events_of


def trained(config: bt.RunConfig, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The run's folder and its final weights."""
    from blocktrain.train.checkpoint import load_checkpoint

    bt.run(config, folder)
    context = build(config, folder)
    load_checkpoint(checkpoints(folder / "checkpoints")[-1], context.partition, context.optimizer)
    return folder, {name: p.detach().clone() for name, p in context.model.named_parameters()}


def test_one_block_is_a_plain_pytorch_loop(tiny, tmp_path: Path) -> None:
    """M = 1 through the whole trainer: rows, losses and weights equal a loop written by hand, bit for bit."""
    settings = ["blocks.count=1", "schedule.visit=6 steps", "optimizer.decay=all", "learning_rate.shape=constant"]
    settings += ["learning_rate.warmup_steps=0", "learning_rate.visit_warmup_steps=0", "model.config.attn_pdrop=0.0"]
    settings += ["model.config.resid_pdrop=0.0", "model.config.embd_pdrop=0.0"]
    config = tiny(*settings)
    run, weights = trained(config, tmp_path / "run")

    context = build(config, tmp_path)
    model = context.model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    plain = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for step in range(6):
        loss = model(**context.data.train.batch(context.rows.order.rows(4 * step, 4 * step + 4))).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
        losses.append(loss.item())
    assert [event["loss"] for event in events_of(run, "step")] == losses
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name


def test_the_same_seed_gives_the_same_run_and_another_does_not(tiny, outcome, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        bt.run(tiny(f"seed={seed}"), tmp_path / name)
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")
    assert outcome(tmp_path / "a")[1] != outcome(tmp_path / "c")[1]


def test_micro_batches_give_the_gradient_of_the_whole_batch(tiny, tmp_path: Path) -> None:
    no_dropout = ["model.config.attn_pdrop=0.0", "model.config.resid_pdrop=0.0", "model.config.embd_pdrop=0.0"]
    _, whole = trained(tiny(*no_dropout), tmp_path / "whole")
    _, parts = trained(tiny("batch.micro_rows=1", *no_dropout), tmp_path / "parts")
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, rtol=1e-4, atol=1e-5)


def test_data_and_dropout_do_not_depend_on_how_often_one_looks(tiny, tmp_path: Path) -> None:
    _, seldom = trained(tiny("evaluation.every=100 steps", "checkpoint.every=100 steps"), tmp_path / "seldom")
    _, often = trained(tiny("evaluation.every=1 steps", "checkpoint.every=1 steps", "log_every=3"), tmp_path / "often")
    assert all(torch.equal(seldom[name], often[name]) for name in seldom)


@pytest.mark.parametrize(
    ("overrides", "steps", "reason"),
    [
        (["schedule.sweeps=2"], 24, "2 sweeps done"),
        (["stop.duration=5 steps"], 5, "5 steps done"),
        (["stop.duration=200 tokens"], 4, "200 tokens done"),
        (["stop.target_loss=5.55", "evaluation.every=1 steps"], None, "reached the target 5.55"),
        (["stop.hours=1e-9"], 1, "hours are over"),
    ],
)
def test_the_run_stops_on_its_own_criterion(
    tiny, tmp_path: Path, overrides: list[str], steps: int | None, reason: str
) -> None:
    bt.run(tiny(*overrides), tmp_path / "run")
    (end,) = events_of(tmp_path / "run", "end")
    assert reason in end["reason"]
    assert steps is None or end["steps"] == steps
    assert end["tokens"] == end["steps"] * 4 * 16
    if "target" in reason:
        assert end["loss"] <= 5.55
        assert end["steps"] < 12
    evaluations = events_of(tmp_path / "run", "evaluation")
    assert evaluations[-1]["step"] == end["steps"]


def test_a_visit_ends_on_a_plateau_and_says_so(tiny, tmp_path: Path) -> None:
    """A threshold that no loss can meet: each visit lasts its minimum and is retired for that reason."""
    rule = ["schedule.plateau.threshold=0.9", "schedule.plateau.patience=1 steps", "schedule.plateau.minimum=3 steps"]
    bt.run(tiny("schedule.visit=50 steps", *rule), tmp_path / "run")
    retired = events_of(tmp_path / "run", "retire")
    assert [event["step"] for event in retired] == [3, 6, 9]
    assert all(event["reason"].startswith("training loss on a plateau") for event in retired)


def test_optimizer_bytes_are_those_of_the_largest_block(tiny, tmp_path: Path) -> None:
    bt.run(tiny(), tmp_path / "run")
    (start,), (cost,), (end,) = (events_of(tmp_path / "run", kind) for kind in ("run", "cost", "end"))
    largest = max(memory["moments"] for memory in cost["memory"]["blocks"])
    assert end["optimizer_bytes"] == largest
    scalars = max(block["parameters"] for block in start["blocks"])
    assert largest - 8 * scalars < 4 * 100  # both moments, and one step count of 4 bytes for each tensor
    assert cost["memory"]["full"]["moments"] == sum(memory["moments"] for memory in cost["memory"]["blocks"])


def test_a_non_finite_loss_stops_with_step_block_and_batch(tiny, tmp_path: Path) -> None:
    config = tiny("optimizer.lr=1e30", "optimizer.max_grad_norm=1e30", "learning_rate.warmup_steps=0")
    with pytest.raises(NonFiniteError, match=r"at step \d+ in Block\(\d: .*batch of training rows \d+, ") as error:
        bt.run(config, tmp_path / "run")
    assert error.value.exit_code == 1
    assert "on_nonfinite = 'skip'" in str(error.value)


def test_a_non_finite_step_can_be_skipped(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, steps = GPT2LMHeadModel.forward, itertools.count()

    def fails_once(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        loss = output.loss
        if loss is not None and torch.is_grad_enabled() and not isinstance(loss, FakeTensor) and next(steps) == 4:
            output.loss = loss * float("nan")
        return output

    monkeypatch.setattr(GPT2LMHeadModel, "forward", fails_once)
    bt.run(tiny("on_nonfinite=skip"), tmp_path / "run")
    assert [event["skipped"] for event in events_of(tmp_path / "run", "step")].count(True) == 1
    (end,) = events_of(tmp_path / "run", "end")
    assert end["steps"] == 12


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["on_nonfinite=skip"], r"1[01] of its 12 steps were skipped because|its validation loss is nan"),
        (["stop.duration=1 steps", "learning_rate.warmup_steps=0"], "its validation loss is nan"),
    ],
)
def test_a_run_without_a_usable_result_is_an_error(tiny, tmp_path: Path, overrides: list[str], message: str) -> None:
    """Both ended with exit code 0. The log is complete."""
    config = tiny("optimizer.lr=1e30", "optimizer.max_grad_norm=1e30", *overrides)
    with pytest.raises(NonFiniteError, match=f"has ended, but ({message})"):
        bt.run(config, tmp_path / "run")
    assert len(events_of(tmp_path / "run", "end")) == 1


def test_counted_flops_add_up(tiny, tmp_path: Path) -> None:
    bt.run(tiny(), tmp_path / "run")
    (cost,), (end,) = (events_of(tmp_path / "run", kind) for kind in ("cost", "end"))
    assert end["flops"] == 4 * sum(cost["flops"]["blocks"])
    assert all(block < cost["flops"]["full"] for block in cost["flops"]["blocks"])


def test_the_prefix_saves_nothing_for_the_backward_pass(tiny, tmp_path: Path) -> None:
    bt.run(tiny(), tmp_path / "run")
    (cost,) = events_of(tmp_path / "run", "cost")
    activations = [memory["activations"] for memory in cost["memory"]["blocks"]]
    assert activations[2] < min(activations[:2])  # two layers and the head, instead of all four layers
    assert max(activations) <= cost["memory"]["full"]["activations"]


def test_only_a_checkpoint_gathers_what_it_is_written_from(tiny, tmp_path: Path, monkeypatch) -> None:
    """Every step once made a checkpoint's source, only to ask whether there is one: for that, a pipeline broadcast the
    active block and sharded ranks exchanged flags before each step and each evaluation."""
    made: list[int] = []
    init = BlocksModule.__init__

    def counted(self: BlocksModule, *args: Any, source: Callable[[], Any], **keywords: Any) -> None:
        init(self, *args, source=lambda: [source(), made.append(1)][0], **keywords)

    monkeypatch.setattr(BlocksModule, "__init__", counted)
    run = bt.run(tiny("schedule.visit=1 step", "checkpoint.every=2 steps"), tmp_path / "run").path
    assert events_of(run, "end")[0]["steps"] == 3
    assert len(made) == 2  # after step 2, and at the end

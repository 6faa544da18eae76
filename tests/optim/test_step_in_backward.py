"""Weights stepped inside the backward pass end with the values of an ordinary step, bit for bit.

`BlockOptimizer(tail=...)` takes any object that follows the `BackwardUpdate` protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import blocktrain as bt
from blocktrain.chain.block import Block, Partition
from blocktrain.chain.checkpointing import checkpointing
from blocktrain.chain.partition import partition
from blocktrain.contrib.learning_tail import Tail
from blocktrain.errors import ConfigError
from blocktrain.integrations.visiting import VisitingOptimizer
from blocktrain.optim.active_block import ActiveBlock
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.precision import BF16_EXACT, FP32, INT8, Precision
from blocktrain.optim.state_store import KeepOnHost
from blocktrain.optim.step_in_backward import BackwardUpdate, StepInBackward
from blocktrain.optim.weight_store import OnHost, WeightLocation
from blocktrain.schedule import Cyclic
from blocktrain.train.context import build
from blocktrain.train.oom_advice import savings
from blocktrain.train.predict_memory import StepShape, predicted_peaks, visited_peaks
from blocktrain.train.step_costs import count_opening, run_header
from blocktrain.units import Duration

from .conftest import OPTIMIZERS, assert_nothing_moves

STEPS = 3


def trained(optimizer: BlockOptimizer, batch, *, visits: list[Block], checkpointed: bool = False) -> list[float]:
    """The gradient norms of `STEPS` steps in each visit, at a falling learning rate."""
    model, norms = optimizer.partition.model, []
    for visit in visits:
        with optimizer.visit(visit):
            for step in range(STEPS):
                optimizer.scale_learning_rate(1 / (step + 1))
                if checkpointed:
                    with checkpointing(optimizer.partition):
                        model(**batch(step)).loss.backward()
                else:
                    model(**batch(step)).loss.backward()
                assert bool(optimizer.gradients()) != optimizer.in_backward
                norms.append(optimizer.clip_grad_norm().item())
                optimizer.step()
                optimizer.zero_grad()
    return norms


def assert_equal_results(made, batch, *, suffix: bool = False, checkpointed: bool = False) -> None:
    """Compare training with and without it. made(in_backward) -> the optimizer of a fresh model."""
    ends = []
    for in_backward in (False, True):
        optimizer: BlockOptimizer = made(in_backward)
        parts = optimizer.partition
        visits = [parts.suffix(i) if suffix else parts[i] for i in (0, 1, 2, 1)]
        norms = trained(optimizer, batch, visits=visits, checkpointed=checkpointed)
        ends.append((optimizer.state_dict(), [optimizer.block_weights(i) for i in range(len(parts))], norms))
    (state, weights, norms), (their_state, their_weights, their_norms) = ends
    torch.testing.assert_close(their_weights, weights, rtol=0, atol=0)
    assert their_state["changed_at"] == state["changed_at"]
    torch.testing.assert_close(their_state["blocks"], state["blocks"], rtol=0, atol=0)
    torch.testing.assert_close(their_state["low_bits"], state["low_bits"], rtol=0, atol=0)
    assert their_norms == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_class_gives_equal_results(name: str, gpt2, batch) -> None:
    cls, options = OPTIMIZERS[name]

    def made(in_backward: bool) -> BlockOptimizer:
        parts = partition(gpt2(), num_blocks=3)
        return BlockOptimizer(parts, cls, state=KeepOnHost(), in_backward=in_backward, **options)

    assert_equal_results(made, batch)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": BF16_EXACT},
        {"precision": BF16_EXACT, "frozen": OnHost()},
        {"precision": INT8},
        {"precision": replace(FP32, moments="8bit")},
        {"tail": Tail(rule="sgd")},
    ],
    ids=["bf16-exact", "from the host", "int8", "8bit", "tail"],
)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_storage_of_weights_gives_equal_results(options: dict[str, Any], checkpointed: bool, gpt2, batch) -> None:
    def made(in_backward: bool) -> BlockOptimizer:
        parts = partition(gpt2(), num_blocks=3)
        return BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2, in_backward=in_backward, **options)

    assert_equal_results(made, batch, checkpointed=checkpointed)


@pytest.mark.parametrize("options", [{"num_blocks": 3, "pieces": "modules"}, {"largest": 1500}])
def test_blocks_of_pieces_and_of_rows_give_equal_results(options: dict[str, Any], gpt2, batch) -> None:
    def made(in_backward: bool) -> BlockOptimizer:
        return BlockOptimizer(partition(gpt2(), **options), torch.optim.AdamW, lr=1e-2, in_backward=in_backward)

    assert_equal_results(made, batch)


@pytest.mark.parametrize("precision", [FP32, BF16_EXACT], ids=lambda precision: precision.name)
def test_a_suffix_gives_equal_results(precision: Precision, gpt2, batch) -> None:
    def made(in_backward: bool) -> BlockOptimizer:
        parts = partition(gpt2(), num_blocks=3)
        options: dict[str, Any] = {"precision": precision, "state": KeepOnHost(), "in_backward": in_backward}
        return BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2, **options)

    assert_equal_results(made, batch, suffix=True)


@pytest.mark.parametrize(
    "precision", [FP32, pytest.param(BF16_EXACT, marks=pytest.mark.slow)], ids=lambda precision: precision.name
)
def test_one_gradient_is_alive_at_a_time(precision: Precision, batch) -> None:
    """The tracked peak of a suffix visit, on real tensors as predicted: the largest weight's gradient, and a bias's."""
    few = {name: tokens[:1, :4] for name, tokens in batch(0).items()}  # so that weights are most of it
    step = StepShape(loss=lambda model: model(**few).loss, inputs=tuple(few.values()))

    def made(in_backward: bool) -> BlockOptimizer:
        model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=6, n_head=4))
        options: dict[str, Any] = {"precision": precision, "in_backward": in_backward}
        return BlockOptimizer(partition(model, num_blocks=2), torch.optim.AdamW, lr=1e-2, fused=True, **options)

    mine, plain = made(True), made(False)
    blocks = [mine.partition.suffix(index) for index in range(2)]
    found = predicted_peaks(mine, step, blocks=blocks)
    assert found == list(visited_peaks(mine, step, blocks=blocks))
    all_at_once = predicted_peaks(plain, step, blocks=[plain.partition.suffix(index) for index in range(2)])
    largest = max(p.numel() for p in mine.partition.whole.parameters.values())
    for block, peak, other in zip(blocks, found, all_at_once, strict=True):
        assert peak.parts.get("gradients", 0) <= 2 * 4 * largest
        assert peak.parts["moments"] == other.parts["moments"]
        if not precision.has_master:  # else the peak of so small a model is the making of masters
            assert other.bytes - peak.bytes > 4 * (block.num_parameters - 6 * largest) > 0


def test_norms_do_not_pile_up(gpt2, batch) -> None:
    mine = BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW, in_backward=True)
    with mine.visit(mine.partition[0]):
        for step in range(2):
            mine.partition.model(**batch(step)).loss.backward()
            assert len(mine.active_block.stepped_norms or ()) == len(mine.partition[0].parameters)
            mine.step()
        assert mine.clip_grad_norm() == 0


def test_after_the_visit_nothing_moves(gpt2, batch) -> None:
    mine = BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW, in_backward=True)
    with mine.visit(mine.partition[0]):
        pass
    assert_nothing_moves(mine.partition.model, batch(0))


class OneCount(torch.optim.Optimizer):
    """Counts its steps for all parameters together, as some do outside of `torch.optim`."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Nothing moves."""


def test_what_cannot_be_stepped_in_backward_is_refused(gpt2, tiny, tmp_path: Path) -> None:
    mine = BlockOptimizer(partition(gpt2(), num_blocks=3), OneCount, in_backward=True)
    with pytest.raises(ConfigError, match="OneCount may not be meant for that"), mine.visit(mine.partition[0]):
        pass
    mine = BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW, in_backward=True)
    with (
        mine.visit(mine.partition[0]),
        pytest.raises(ConfigError, match="they cannot be clipped to 1"),
    ):
        mine.clip_grad_norm(1.0)
    with pytest.raises(ConfigError, match=r"^in_backward = true updates weights in each backward pass"):
        VisitingOptimizer(mine, Cyclic(visit=Duration.steps(2)))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "get_world_size", lambda: 2)
            with pytest.raises(
                ConfigError,
                match=r"^in_backward = true updates weights .*, before gradients of several processes are summed",
            ):
                BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW, in_backward=True)
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(ConfigError, match="leave out max_grad_norm = 1, or in_backward"):
        tiny("optimizer.in_backward=true")
    for override, said in {
        "batch.micro_rows=2": "leave out batch.micro_rows",
        "batch.micro_rows=auto": "leave out batch.micro_rows",
        "on_nonfinite=skip": "set on_nonfinite = 'stop'",
        "distributed.layout=pipeline": "does not go with optimizer.in_backward = True",
    }.items():
        with pytest.raises(ConfigError, match=said):
            tiny("optimizer.in_backward=true", "optimizer.max_grad_norm=none", override)


@pytest.mark.usefixtures("uncounted")
def test_a_run_is_equal_bit_for_bit(tiny, tmp_path: Path, outcome) -> None:
    """Losses, norms and final files."""
    found = {}
    for in_backward in ("false", "true"):
        folder = tmp_path / in_backward
        bt.run(tiny("optimizer.max_grad_norm=none", f"optimizer.in_backward={in_backward}"), folder)
        log, files = outcome(folder)
        losses = [event["loss"] for event in log if event["kind"] in ("step", "evaluation")]
        norms = [event["grad_norm"] for event in log if event["kind"] == "step"]
        found[in_backward] = (losses, norms, {name: file for name, file in files.items() if "safetensors" in name})
    assert found["true"][0] == found["false"][0]
    assert found["true"][1] == pytest.approx(found["false"][1], rel=1e-6)
    assert found["true"][2] == found["false"][2]
    assert found["true"][2]


def test_it_is_proposed_when_memory_is_short(tiny, tmp_path: Path) -> None:
    parts = {"gradients": 10**6}
    context = build(tiny("optimizer.max_grad_norm=none"), tmp_path / "plain")
    largest = max(p.nbytes for p in context.model.parameters())
    assert savings(context, parts)["optimizer.in_backward = true"] == 10**6 - largest
    for other in ("optimizer.in_backward=true", "optimizer.max_grad_norm=1.0", "batch.micro_rows=2"):
        known = build(tiny("optimizer.max_grad_norm=none", other), tmp_path / other)
        assert "optimizer.in_backward = true" not in savings(known, parts)
        assert ("batch.rows 4 -> 2" in savings(known, {"logits": 10})) == (other == "optimizer.in_backward=true")


def test_the_memory_estimate_counts_the_largest_gradient(tiny, tmp_path: Path) -> None:
    context = build(tiny("optimizer.max_grad_norm=none", "optimizer.in_backward=true"), tmp_path)
    cost = count_opening(context, run_header(context, "bcd")).costs.to_event()
    for block, parts in zip(context.partition, cost["memory"]["blocks"], strict=True):
        assert parts["gradients"] == max(p.nbytes for p in block.parameters.values())


def test_a_weight_that_is_used_twice_moves_once() -> None:
    """It moves when both of its gradients are summed."""
    ends = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        shared = nn.Linear(4, 4)
        model = nn.Sequential(nn.Linear(4, 4), shared, nn.Tanh(), shared, nn.Linear(4, 1))
        mine = BlockOptimizer(partition(model, num_blocks=2), torch.optim.AdamW, lr=1e-2, in_backward=in_backward)
        for block in mine.partition:
            with mine.visit(block):
                model(torch.ones(2, 4)).sum().backward()
                mine.step()
                mine.zero_grad()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


# -- updates of one's own ----------------------------------------------------------------------------------------------


BIAS = "transformer.ln_f.bias"


class MoveLastBias:
    """Adds one to the bias of the last norm in each backward pass."""

    setting = "tail = 'bias'"

    def require(self, partition: Partition, precision: Precision, frozen: WeightLocation) -> None:
        if precision.has_master:
            raise ConfigError(f"{self.setting} needs fp32")

    def also_updates(self, partition: Partition, block: Block) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in partition.parameters_above(block).items() if name == BIAS}

    @contextmanager
    def updating(self, partition: Partition, active: ActiveBlock) -> Iterator[None]:
        def move(weight: torch.Tensor) -> None:
            weight.grad = None
            weight.data += active.param_groups[0]["lr"]

        hooks = [
            p.requires_grad_(True).register_post_accumulate_grad_hook(move)
            for p in self.also_updates(partition, active.block).values()
        ]
        yield
        for hook in hooks:
            hook.remove()


def test_an_update_of_ones_own_moves_what_it_says(gpt2, batch) -> None:
    parts = partition(gpt2(), num_blocks=3)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=1.0, tail=MoveLastBias())
    before = {name: p.detach().clone() for name, p in parts.model.named_parameters()}
    assert [list(optimizer.tail_of(block)) for block in parts] == [[BIAS], [BIAS], []]
    with optimizer.visit(parts[0]):
        for step in range(2):
            parts.model(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    moved = {name for name, p in parts.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {*parts[0].parameters, BIAS}
    assert torch.equal(parts.model.get_parameter(BIAS), before[BIAS] + 2)
    assert optimizer.changed_at == [2, 0, 2]  # block 1 is below the bias and did not move
    again = optimizer.rebind(partition(gpt2(), num_blocks=3))
    assert again.tail is optimizer.tail


def test_what_it_requires_is_checked_when_the_optimizer_is_made(gpt2) -> None:
    with pytest.raises(ConfigError, match="tail = 'bias' needs fp32"):
        BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW, tail=MoveLastBias(), precision=BF16_EXACT)
    optimizer = BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW, tail=MoveLastBias())
    with pytest.raises(ConfigError, match=r"^tail = 'bias' updates weights in each backward pass"):
        VisitingOptimizer(optimizer, Cyclic(visit=Duration.steps(2)))


def test_the_tail_acts_before_the_blocks_own_step(gpt2) -> None:
    updates: list[BackwardUpdate] = [Tail(rule="sgd"), StepInBackward()]  # both follow the protocol
    optimizer = BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW, tail=updates[0], in_backward=True)
    assert [update.setting for update in optimizer.backward_updates] == [update.setting for update in updates]

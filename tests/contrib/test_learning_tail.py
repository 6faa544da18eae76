"""A tail moved inside the backward pass ends with the values that it has when all gradients are kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from blocktrain.chain.checkpointing import checkpointing
from blocktrain.chain.partition import partition
from blocktrain.contrib.learning_tail import Rule, Tail, orthogonalize
from blocktrain.errors import ConfigError
from blocktrain.integrations.visiting import VisitingOptimizer
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.factory import hidden_matrices
from blocktrain.optim.precision import BF16_EXACT
from blocktrain.optim.weight_store import OnHost
from blocktrain.schedule import Cyclic
from blocktrain.train.predict_memory import StepShape, predicted_peaks, visited_peaks
from blocktrain.units import Duration

from ..optim.conftest import assert_nothing_moves

RATE, STEPS = 1e-2, 3


def optimizer(model: nn.Module, tail: Tail | None, **options) -> BlockOptimizer:
    return BlockOptimizer(partition(model, num_blocks=3), torch.optim.AdamW, lr=RATE, tail=tail, **options)


def direction(gradient: Tensor, *, orthogonal: bool) -> Tensor:
    """The update of one weight, from its formula."""
    if orthogonal:
        return orthogonalize(gradient) * (2 * math.sqrt(max(gradient.shape)))
    return gradient / (torch.linalg.vector_norm(gradient) / math.sqrt(gradient.numel()))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("rule", ["sgd", "newton-schulz"])
def test_the_tail_ends_where_kept_gradients_bring_it(rule: Rule, checkpointed: bool, gpt2, batch) -> None:
    plain = gpt2().eval()
    parts = partition(plain, num_blocks=3)
    matrices = hidden_matrices(parts) if rule == "newton-schulz" else set()
    tail = {name: p for block in parts[2:] for name, p in block.parameters.items()}
    for name, p in plain.named_parameters():
        p.requires_grad_(name in tail or name in parts[1].parameters)
    for module in parts[1].modules():
        module.train()
    theirs = BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW, lr=RATE).factory.build(
        parts[1].parameters
    )
    for step in range(STEPS):
        plain(**batch(step)).loss.backward()
        with torch.no_grad():
            for name, p in tail.items():
                assert p.grad is not None
                p.add_(direction(p.grad, orthogonal=name in matrices), alpha=-0.3 * RATE)
                p.grad = None
        for one in theirs:
            one.step()
            one.zero_grad()

    mine = optimizer(gpt2(), Tail(rule=rule, share=0.3))
    model = mine.partition.model
    before = {name: p.detach().clone() for name, p in mine.partition[0].parameters.items()}
    with mine.visit(mine.partition[1]):
        for step in range(STEPS):
            if checkpointed:
                with checkpointing(mine.partition):
                    model(**batch(step)).loss.backward()
            else:
                model(**batch(step)).loss.backward()
            assert all(p.grad is None for p in mine.tail_of(mine.partition[1]).values())
            mine.step()
            mine.zero_grad()
    assert mine.progress()["changed_at"] == [0, STEPS, STEPS]  # so that the next checkpoint writes the tail, too
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    fresh = dict(gpt2().named_parameters())
    assert not any(torch.equal(p, fresh[name]) for name, p in tail.items())
    assert all(torch.equal(p, before[name]) for name, p in mine.partition[0].parameters.items())


def test_its_learning_rate_follows_the_active_block(gpt2, batch) -> None:
    mine = optimizer(gpt2(), Tail(rule="sgd", share=0.5))
    name, weight = next(iter(mine.partition[2].parameters.items()))
    with mine.visit(mine.partition[0]):
        mine.scale_learning_rate(0.1)
        before = weight.detach().clone()
        mine.partition.model(**batch(0)).loss.backward()
    assert (weight - before).square().mean().sqrt().item() == pytest.approx(0.5 * 0.1 * RATE, rel=1e-3), name


def test_after_the_visit_nothing_moves(gpt2, batch) -> None:
    mine = optimizer(gpt2(), Tail(rule="sgd"))
    with mine.visit(mine.partition[0]):
        pass
    assert_nothing_moves(mine.partition.model, batch(0))


def test_one_gradient_of_the_tail_is_alive_at_a_time(gpt2, batch) -> None:
    """The tracked peak of a visit, as predicted and on real tensors, has the block's own gradients and moments, and at
    most the gradients of the tail's largest weight and its bias."""
    step = StepShape(loss=lambda model: model(**batch(0)).loss, inputs=tuple(batch(0).values()))
    mine = optimizer(gpt2(), Tail(rule="sgd"))
    predicted = predicted_peaks(mine, step)
    assert predicted == list(visited_peaks(mine, step))
    alone = predicted_peaks(optimizer(gpt2(), None), step)
    for block, with_tail, without in zip(mine.partition, predicted, alone, strict=True):
        one = max((p.nbytes for p in mine.tail_of(block).values()), default=0)
        assert with_tail.parts["moments"] == without.parts["moments"]
        assert with_tail.parts["gradients"] <= 4 * block.num_parameters + 2 * one
    assert predicted[2] == alone[2]  # nothing lies above it


def test_what_cannot_have_a_tail_is_refused(tiny, gpt2) -> None:
    tail = Tail(rule="sgd")
    with pytest.raises(ConfigError, match=r"precision 'bf16-exact' have no master: set precision = 'fp32'"):
        optimizer(gpt2(), tail, precision=BF16_EXACT)
    with pytest.raises(ConfigError, match=r"offloads them: set memory.frozen = 'device'"):
        optimizer(gpt2(), tail, frozen=OnHost())
    with pytest.raises(ConfigError, match=r"has rows of .* only: use larger blocks"):
        BlockOptimizer(partition(gpt2(), largest=1000), torch.optim.AdamW, tail=tail)
    with pytest.raises(ConfigError, match="a loop that may accumulate"):
        VisitingOptimizer(optimizer(gpt2(), tail), Cyclic(visit=Duration.steps(2)))
    with pytest.raises(ConfigError, match="tail 'sdg' is unknown; did you mean 'sgd'"):
        Tail(rule="sdg")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="tail_share must be positive, not 0"):
        Tail(rule="sgd", share=0)
    for override, said in {
        "batch.micro_rows=2": "leave out batch.micro_rows",
        "batch.micro_rows=auto": "leave out batch.micro_rows",
        "on_nonfinite=skip": "set on_nonfinite = 'stop'",
        "schedule.span=suffix": "schedule.span = 'suffix' already trains every block above",
        "optimizer.tail_share=-1": "tail_share must be positive, not -1",
    }.items():
        with pytest.raises(ConfigError, match=said):
            tiny("optimizer.tail=sgd", override)


def test_several_processes_are_refused(gpt2, tmp_path) -> None:
    """One process of a group of one may: there is nothing to sum."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        optimizer(gpt2(), Tail(rule="sgd"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "get_world_size", lambda: 2)
            with pytest.raises(ConfigError, match="before gradients of several processes are summed"):
                optimizer(gpt2(), Tail(rule="sgd"))
    finally:
        torch.distributed.destroy_process_group()

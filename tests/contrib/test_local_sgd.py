"""Averages of local steps follow the formula in `local_sgd.py`, computed by hand from the weights of each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import blocktrain as bt
from blocktrain.contrib.local_sgd import LocalSGD
from blocktrain.errors import ConfigError
from blocktrain.optim.adamw8bit import AdamW8bit
from blocktrain.parallel.config import DistributedConfig
from blocktrain.parallel.ranks import Ranks, open_ranks
from blocktrain.testing import run_distributed

WIDTH, ROWS, STEPS = 4, 6, 5
OUTER_LR, MOMENTUM = 0.5, 0.8
NAME = "0.weight"


def build(
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, width: int = WIDTH
) -> tuple[bt.Partition, bt.BlockOptimizer]:
    torch.manual_seed(0)
    partition = bt.partition(nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1)), num_blocks=2)
    return partition, bt.BlockOptimizer(partition, optimizer, lr=0.1)


def train() -> dict[str, Any]:
    """A visit of five steps with an average after every second; the weights and a moment around each `after_step`."""
    with open_ranks() as ranks:
        parallel = LocalSGD(ranks, DistributedConfig(sync_every=2, outer_lr=OUTER_LR, outer_momentum=MOMENTUM))
        partition, optimizer = build()
        rows = torch.randn(STEPS, ROWS, WIDTH, generator=torch.Generator().manual_seed(ranks.rank))
        weight = dict(partition.model.named_parameters())[NAME]
        found: dict[str, Any] = {"start": weight.tolist(), "before": [], "after": [], "in_sync": []}

        def note(key: str) -> None:
            moment = optimizer.active_block.entries()[NAME]["exp_avg"]
            found[key].append((weight.tolist(), moment.tolist()))

        with optimizer.visit(partition[0]), parallel.visit(optimizer.active_block):
            for step in range(STEPS):
                with parallel.gradient_sync():
                    (partition.model(rows[step]).square().sum() / ROWS / ranks.size).backward()
                optimizer.step()
                optimizer.zero_grad()
                note("before")
                parallel.after_step(step)
                note("after")
                found["in_sync"].append(parallel.in_sync)
        found["end"] = weight.tolist()
        found["all_reduced"] = ranks.all_reduced_bytes
        return found


def test_weights_take_the_outer_step_and_moments_are_averaged() -> None:
    ranks = run_distributed(train, 2)
    anchor = torch.tensor(ranks[0]["start"])
    velocity = torch.zeros_like(anchor)
    for step in range(STEPS):
        before = [torch.tensor(found["before"][step][0]) for found in ranks]
        after = [torch.tensor(found["after"][step][0]) for found in ranks]
        assert not torch.equal(*before), "each rank has rows of its own"
        if step % 2 == 0:
            assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
            continue
        moved = anchor - (before[0] + before[1]) / 2
        velocity = MOMENTUM * velocity + moved
        anchor = anchor - OUTER_LR * (moved + MOMENTUM * velocity)
        moments = [torch.tensor(found["before"][step][1]) for found in ranks]
        for found, weight in zip(ranks, after, strict=True):
            torch.testing.assert_close(weight, anchor)
            torch.testing.assert_close(torch.tensor(found["after"][step][1]), (moments[0] + moments[1]) / 2)
    for found in ranks:
        assert found["in_sync"] == [False, True, False, True, False]
        assert found["end"] == ranks[0]["end"], "a visit ends with an average"
        assert found["end"] != found["after"][-1][0]
    # Three averages of the block's weights and two moments, in fp32; no gradients.
    assert ranks[0]["all_reduced"] == 3 * 3 * 4 * (WIDTH * WIDTH + WIDTH)


def test_state_that_cannot_be_averaged_is_refused_by_name() -> None:
    """Moments in 8 bits are codes: their mean has no meaning."""
    width = 64  # below 4,096 elements AdamW8bit keeps moments in fp32
    partition, optimizer = build(AdamW8bit, width)
    parallel = LocalSGD(Ranks(), DistributedConfig(sync_every=2))
    with optimizer.visit(partition[0]), parallel.visit(optimizer.active_block):
        with parallel.gradient_sync():
            partition.model(torch.ones(ROWS, width)).sum().backward()
        optimizer.step()
        with pytest.raises(ConfigError, match=r"averages the optimizer's state, and '.*' of '0\.weight' is u?int8"):
            parallel.after_step(1)
        parallel.in_sync = True  # so that the end of the visit does not average again

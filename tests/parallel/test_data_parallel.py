"""Gradients of the active block equal those of one process with all rows; nothing else is sent."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blocktrain as bt
from blocktrain.contrib.local_sgd import LocalSGD
from blocktrain.errors import ConfigError, PeerError
from blocktrain.integrations.visiting import VisitingOptimizer
from blocktrain.parallel.config import DistributedConfig
from blocktrain.parallel.data_parallel import DataParallel
from blocktrain.parallel.fsdp import ShardedDataParallel
from blocktrain.parallel.ranks import Ranks, open_ranks
from blocktrain.testing import run_distributed

WIDTH, ROWS = 8, 8


class Experts(nn.Module):
    """Two experts, of which each row chooses one, and a third that no row chooses."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()  # the sign of this feature says in which half of the batch a row is
        found = torch.zeros_like(x)
        for number in (0, 1):
            mine = chosen == number
            if mine.any():
                found[mine] = self.experts[number](x[mine])
        return x + found


def build(**options: Any) -> tuple[bt.Partition, bt.BlockOptimizer, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 1))
    partition = bt.partition(model, num_blocks=3)
    rows = torch.randn(ROWS, WIDTH)
    rows[:, 0] = torch.cat([torch.ones(ROWS // 2), -torch.ones(ROWS // 2)])
    return partition, bt.BlockOptimizer(partition, torch.optim.AdamW, lr=0.1, **options), rows


def gradients(optimizer: bt.BlockOptimizer) -> dict[str, Tensor | None]:
    found = {name: optimizer.active_block.gradient(name) for name in optimizer.active_block.trained}
    return {name: None if gradient is None else gradient.float().clone() for name, gradient in found.items()}


def backward(partition: bt.Partition, rows: Tensor) -> None:
    (partition.model(rows).square().sum() / ROWS).backward()


def compare(settings: dict[str, Any], micro: int, precision: str) -> list[dict[str, Any]]:
    """For each block: how far the gradients are from those of the whole batch, what was missing, bytes sent."""
    options = {} if precision == "fp32" else {"precision": bt.BF16_EXACT}
    with open_ranks() as ranks:
        parallel = DataParallel(ranks, DistributedConfig(**settings))
        partition, optimizer, rows = build(**options)
        if precision != "fp32":
            rows = rows.bfloat16()
        mine = rows.view(ranks.size, -1, WIDTH)[ranks.rank]
        found = []
        for block in partition:
            with optimizer.visit(block):
                for part in rows.view(ranks.size, -1, WIDTH):
                    for piece in part.split(micro):
                        backward(partition, piece)
                expected = gradients(optimizer)
                optimizer.zero_grad()
                before = ranks.all_reduced_bytes
                with parallel.visit(optimizer.active_block):
                    for _ in range(2):  # twice, because nothing may be left over from the first step
                        optimizer.zero_grad()
                        *others, last = mine.split(micro)
                        for piece in others:
                            backward(partition, piece)
                        with parallel.gradient_sync():
                            backward(partition, last)
                    sent = ranks.all_reduced_bytes - before
                    got = gradients(optimizer)
                optimizer.zero_grad()
                backward(partition, rows[:1])  # outside of the visit nothing is sent
                late = ranks.all_reduced_bytes - before - sent
            scale = max(float(value.abs().max()) for value in expected.values() if value is not None)
            found.append(
                {
                    "same names": all((got[name] is None) == (value is None) for name, value in expected.items()),
                    "missing": sum(value is None for value in got.values()),
                    "error": max(
                        float((found_here - value).abs().max()) / scale
                        for name, value in expected.items()
                        if value is not None and (found_here := got[name]) is not None
                    ),
                    "sent": sent,
                    "late": late,
                    "scalars": block.num_parameters,
                    "tensors": len(block.parameters),
                }
            )
        return found


# fp32 sums of 2 or 4 terms in another order: a few units in the last place. bf16: 8 bits.
CASES = {
    "fp32": ({}, ROWS, "fp32", 4, 2e-6),
    "a bucket for each tensor, micro-batches": ({"bucket_bytes": 1}, 1, "fp32", 4, 2e-6),
    "bf16 on the wire": ({"reduce_dtype": "bf16"}, ROWS, "fp32", 2, 2e-2),
    "fp32 masters": ({}, 1, "bf16-exact", 4, 2e-2),
}


def compare_all() -> dict[str, Any]:
    return {name: compare(*case[:3]) for name, case in CASES.items()}


@pytest.fixture(scope="module", params=[2, 4])
def compared(request: pytest.FixtureRequest) -> dict[str, list[list[dict[str, Any]]]]:
    by_rank = run_distributed(compare_all, request.param)
    return {name: [found[name] for found in by_rank] for name in CASES}


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_all_rows(compared: dict[str, Any], case: str) -> None:
    *_, itemsize, tolerance = CASES[case]
    for blocks in compared[case]:
        for block in blocks:
            assert block["error"] < tolerance
            assert block["sent"] == 2 * (itemsize * block["scalars"] + 4 * block["tensors"])
            assert block["late"] == 0


@pytest.mark.parametrize("case", CASES)
def test_an_expert_without_rows_on_a_rank_does_not_block_the_others(compared: dict[str, Any], case: str) -> None:
    """Each rank's rows choose one expert, so the other has no gradient there; the third has none anywhere."""
    for blocks in compared[case]:
        assert all(block["same names"] for block in blocks)
        assert [block["missing"] for block in blocks] == [2, 0, 0]


def with_norm(rank: int) -> tuple[bt.Partition, bt.BlockOptimizer, nn.BatchNorm1d, Tensor]:
    """Three blocks, of which the second is a BatchNorm with the statistics of the last batch; and this rank's rows."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH, momentum=1.0)
    partition = bt.partition(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 1)), num_blocks=3)
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    return partition, bt.BlockOptimizer(partition, torch.optim.AdamW, lr=0.1), norm, rows


def statistics() -> dict[str, list[list[float]]]:
    """By the way to train: the BatchNorm's statistics of this rank's rows, and those after a step."""
    found = {}
    with open_ranks() as ranks:
        for way in (DataParallel, ShardedDataParallel, LocalSGD, VisitingOptimizer):
            partition, optimizer, norm, rows = with_norm(ranks.rank)
            hidden = partition.model.get_submodule("0")(rows)
            with ExitStack() as stack:
                loop: Any
                if way is VisitingOptimizer:
                    loop = VisitingOptimizer(optimizer, bt.Cyclic(visit=bt.Duration.steps(9), order=[1]), ranks=ranks)
                    stack.callback(loop.close)
                else:
                    loop = way(ranks, DistributedConfig(sync_every=1))  # pyright: ignore[reportCallIssue, reportArgumentType]
                    stack.enter_context(optimizer.visit(partition[1]))
                    stack.enter_context(loop.visit(optimizer.active_block))
                with loop.gradient_sync():
                    backward(partition, rows)
                if isinstance(loop, LocalSGD):
                    loop.after_step(0)
            buffers = dict(norm.named_buffers())
            after = [*buffers["running_mean"].tolist(), *buffers["running_var"].tolist()]
            found[way.__name__] = [hidden.mean(0).tolist() + hidden.var(0).tolist(), after]
    return found


def test_batchnorm_statistics_are_averages_over_the_ranks() -> None:
    """Each rank's are of its own rows."""
    by_rank = run_distributed(statistics, 2)
    for way in by_rank[0]:
        own = torch.tensor([found[way][0] for found in by_rank])
        assert (own[0] - own[1]).abs().max() > 0.1
        for found in by_rank:
            torch.testing.assert_close(torch.tensor(found[way][1]), own.mean(0), rtol=1e-5, atol=1e-6, msg=way)


def drift() -> list[str]:
    """What is said of a rank whose weight, and of one whose buffer, is off by little."""
    messages = []
    with open_ranks() as ranks:
        parallel = DataParallel(ranks, DistributedConfig())
        partition, optimizer, norm, _ = with_norm(0)
        for tensor in (norm.weight, dict(norm.named_buffers())["running_mean"]):
            try:
                with optimizer.visit(partition[1]), parallel.visit(optimizer.active_block), torch.no_grad():
                    if ranks.rank == 2:
                        tensor[3] += 1e-6
                messages.append("nothing")
            except PeerError as error:
                messages.append(str(error))
            with torch.no_grad():
                tensor.fill_(1.0)
    return messages


def test_a_rank_that_drifts_is_named_on_every_rank() -> None:
    """In a weight, and in a buffer, which no gradient keeps equal."""
    results = run_distributed(drift, 4)
    assert all(messages == results[0] for messages in results)
    for message in results[0]:
        assert "the weights of Block(1" in message
        assert "rank 2 of 4 drifted" in message


def test_one_process_sends_nothing_and_changes_nothing() -> None:
    partition, optimizer, rows = build()
    parallel = DataParallel(Ranks(), DistributedConfig(reduce_dtype="bf16"))
    with optimizer.visit(partition[0]):
        backward(partition, rows)
        expected = gradients(optimizer)
        optimizer.zero_grad()
        with parallel.visit(optimizer.active_block), parallel.gradient_sync():
            backward(partition, rows)
        for name, value in gradients(optimizer).items():
            alone = expected[name]
            assert (value is None) == (alone is None)
            assert value is None or alone is None or torch.equal(value, alone)


@pytest.mark.parametrize(
    "values",
    [{"bucket_bytes": 0}, {"timeout_seconds": 0.0}, {"sync_every": 0}, {"outer_lr": 0.0}, {"outer_momentum": 1.0}],
)
def test_bad_values(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        DistributedConfig(**values)

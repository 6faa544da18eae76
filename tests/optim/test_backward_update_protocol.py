"""`BlockOptimizer(tail=...)` takes any object that follows the `BackwardUpdate` protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from blocktrain.chain.block import Block, Partition
from blocktrain.chain.partition import partition
from blocktrain.contrib.learning_tail import Tail
from blocktrain.errors import ConfigError
from blocktrain.integrations.visiting import VisitingOptimizer
from blocktrain.optim.active_block import ActiveBlock
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.precision import BF16_EXACT, Precision
from blocktrain.optim.step_in_backward import BackwardUpdate, StepInBackward
from blocktrain.optim.weight_store import WeightLocation
from blocktrain.schedule import Cyclic
from blocktrain.units import Duration

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
    with pytest.raises(ConfigError, match=r"^tail = 'bias' moves weights in each backward pass"):
        VisitingOptimizer(optimizer, Cyclic(visit=Duration.steps(2)))


def test_the_tail_acts_before_the_blocks_own_step(gpt2) -> None:
    updates: list[BackwardUpdate] = [Tail(rule="sgd"), StepInBackward()]  # both follow the protocol
    optimizer = BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW, tail=updates[0], in_backward=True)
    assert [update.setting for update in optimizer.backward_updates] == [update.setting for update in updates]

"""What a run's opening counts: of blocks that are alike, two."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.runtime import to_device
from blocktrain.train import step_costs
from blocktrain.train.context import build
from blocktrain.train.interpolate_step_costs import measured_positions

SIX_LAYERS = ["model.config.n_layer=6", "blocks.count=8"]


@pytest.mark.parametrize(
    "memory", [[], ["memory.checkpointing=layers", "memory.loss_chunk=8"]], ids=["plain", "saving"]
)
def test_blocks_between_alike_ones_cost_what_they_cost_when_counted(tiny, tmp_path: Path, memory: list[str]) -> None:
    """FLOPs and saved bytes to the last one: a block's step is its kind's, and each layer above adds the same."""
    context = build(tiny(*SIX_LAYERS, *memory), tmp_path)
    assert measured_positions(context.partition) == [0, 1, 6, 7]
    batch = to_device(context.data.train.batch(range(context.micro_rows)), context.device)
    direct = [step_costs.counted_step(context, block, batch) for block in context.partition]
    assert step_costs.counted_steps(context, batch) == direct
    assert len({step.flops for step in direct[1:7]}) == 6

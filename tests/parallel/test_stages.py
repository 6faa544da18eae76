"""The stages of a pipeline as plain numbers, without processes: who runs which layers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import blocktrain as bt
from blocktrain.chain.block import Partition
from blocktrain.errors import ConfigError
from blocktrain.parallel.config import PipelineConfig
from blocktrain.parallel.stages import stages, visit_costs

EVEN = [1.0] * 12


def cut(blocks: int, pieces: int = 1) -> Partition:
    return bt.partition(nn.Sequential(*(nn.Linear(2, 2) for _ in range(12))), num_blocks=blocks, stages=pieces)


def plan(partition: Partition, block: int, processes: int, **settings: Any) -> list[list[int]]:
    found = stages(partition, partition[block], processes, PipelineConfig(**settings), EVEN)
    return [list(run) for run in found]


def test_a_piece_of_each_block_stays_where_it_is() -> None:
    """The paper's Figure 2: three cards, two blocks, each with a part of every card's layers."""
    partition = cut(2, 3)
    assert [[int(layer.name) for layer in block.layers] for block in partition] == [
        [0, 1, 4, 5, 8, 9],
        [2, 3, 6, 7, 10, 11],
    ]
    for block in range(2):
        assert plan(partition, block, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert plan(partition, 1, 3, start="boundary")[0] == [2, 3]


def test_contiguous_blocks_are_spread_by_what_a_visit_costs() -> None:
    partition = cut(3)
    assert visit_costs(partition[1], EVEN) == [1.0] * 4 + [3.0] * 4 + [2.0] * 4
    assert plan(partition, 1, 2) == [list(range(7)), list(range(7, 12))]  # 13 and 11 forward passes
    assert plan(partition, 1, 2, start="boundary") == [[4, 5, 6], [7, 8, 9, 10, 11]]  # 9 and 11
    assert plan(partition, 2, 4, start="boundary") == [[8], [9], [10], [11]]


def test_the_interleaved_schedule_spreads_each_block() -> None:
    partition = cut(3)
    pieces = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert plan(partition, 0, 2, schedule="interleaved") == pieces
    assert plan(partition, 2, 2, schedule="interleaved", start="boundary") == pieces[4:]


def test_what_cannot_be_shared_is_an_error() -> None:
    with pytest.raises(ConfigError, match="13 processes cannot share the layers"):
        plan(cut(3), 0, 13)
    with pytest.raises(ConfigError, match=r"pieces of 3 stages, but there are 2 processes, .* blocks\.stages = 2"):
        plan(cut(2, 3), 0, 2)
    with pytest.raises(ConfigError, match="needs contiguous blocks"):
        plan(cut(2, 3), 0, 3, schedule="interleaved")
    with pytest.raises(ConfigError, match="stages = 0"):
        cut(2, 0)
    with pytest.raises(ConfigError, match="stages = 2"):
        bt.partition(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), largest=100, stages=2)

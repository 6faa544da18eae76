"""Blocks and partitions print, count and index as one expects of plain data."""

from __future__ import annotations

import pytest
from torch import nn

from blocktrain.chain.block import Partition
from blocktrain.chain.partition import partition
from blocktrain.errors import PartitionError


@pytest.fixture
def parts() -> Partition:
    return partition(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 1)), num_blocks=2)


def test_a_partition_is_a_sequence_of_blocks(parts: Partition):
    assert len(parts) == 2
    assert [block.index for block in parts] == [0, 1]
    assert parts[-1] is parts[1]
    assert parts[:1] == (parts[0],)
    assert parts.index(parts[1]) == 1


def test_counts(parts: Partition):
    assert [block.num_parameters for block in parts] == [9, 16]
    assert parts.num_parameters == 25


def test_modules_are_in_forward_order(parts: Partition):
    model = parts.model
    assert list(parts[0].modules()) == [model.get_submodule("0"), model.get_submodule("1")]
    assert list(parts[1].modules()) == [model.get_submodule("2"), model.get_submodule("3")]


def test_the_whole_is_every_parameter_under_its_name(parts: Partition):
    assert dict(parts.whole.parameters) == dict(parts.model.named_parameters())
    assert parts.whole.layers == parts.chain.layers


def test_blocks_as_one(parts: Partition):
    whole = parts.suffix(0)
    assert (whole.index, whole.members, whole.num_parameters) == (0, (0, 1), 25)
    assert dict(whole.parameters) == dict(parts.model.named_parameters())
    assert whole.layers == parts.chain.layers
    assert whole is parts.union(range(2))
    assert whole in parts
    assert parts.suffix(1) is parts[1]
    assert parts[1].members == (1,)
    assert parts.whole not in parts
    assert repr(whole) == "Block(0 to 1: 0 .. 3, 25 parameters)"


def test_what_is_above_a_union_is_above_its_last_block(parts: Partition):
    assert list(parts.parameters_above(parts[0])) == ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert parts.parameters_above(parts.suffix(0)) == {}


def test_parts_of_parameters_are_not_joined(parts: Partition):
    rows = partition(parts.model, largest=3)
    with pytest.raises(PartitionError, match=r"owns only rows 0 to 1 of '0.weight', .* set schedule.span = 'block'"):
        rows.suffix(0)


def test_they_print_what_they_hold(parts: Partition):
    assert repr(parts) == "Partition(\n  Block(0: 0, 9 parameters)\n  Block(1: 2 .. 3, 16 parameters)\n)"

"""Divisions are as even as any: compared with all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from blocktrain.chain.balance import balanced
from blocktrain.errors import PartitionError


def all_divisions(layers: int, parts: int) -> Iterator[list[range]]:
    for inner in combinations(range(1, layers), parts - 1):
        yield [range(start, end) for start, end in pairwise([0, *inner, layers])]


def merit(costs: list[int], division: list[range]) -> tuple[int, int]:
    """The largest part, then the sum of squares."""
    sums = [sum(costs[i] for i in part) for part in division]
    return max(sums), sum(total * total for total in sums)


@pytest.mark.parametrize("seed", range(150))
def test_no_division_is_better(seed: int):
    rng = random.Random(seed)
    layers = rng.randint(1, 9)
    costs = [rng.choice([0, 1, 2, 3, 5, 8, 50]) for _ in range(layers)]
    parts = rng.randint(1, layers)
    found = balanced(costs, parts)
    assert found in list(all_divisions(layers, parts))
    assert merit(costs, found) == min(merit(costs, division) for division in all_divisions(layers, parts))


def test_the_largest_part_comes_before_evenness():
    # [1 5] [2] [3] has squares 49 and largest part 6; [1] [5] [2 3] has squares 51 and largest part 5.
    assert balanced([1, 5, 2, 3], 3) == [range(0, 1), range(1, 2), range(2, 4)]


def test_real_costs_as_floats():
    """Parameters of an untied GPT-2: embedding, 12 equal layers, head."""
    costs = [39.4e6, *[7.09e6] * 12, 38.6e6]
    assert [len(part) for part in balanced(costs, 3)] == [3, 8, 3]


def test_one_part_and_as_many_as_layers():
    assert balanced([3, 1, 2], 1) == [range(0, 3)]
    assert balanced([3, 1, 2], 3) == [range(0, 1), range(1, 2), range(2, 3)]


def test_too_few_or_too_many_parts():
    with pytest.raises(PartitionError, match="num_blocks must be at least 1, not 0"):
        balanced([1, 2], 0)
    with pytest.raises(PartitionError, match="3 blocks need at least 3 layers; the model has 2: use fewer blocks"):
        balanced([1, 2], 3)

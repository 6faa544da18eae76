"""The order is a pure function: requests for any pieces, in any order, return the rows of the whole order."""

from __future__ import annotations

import numpy as np
import pytest

from blocktrain.data.sampling import ShuffledRows, rank_share
from blocktrain.errors import ConfigError, DataError
from blocktrain.runtime import permutation


def test_every_epoch_is_a_different_permutation():
    order = ShuffledRows(100, seed=3)
    epochs = [order.rows(100 * epoch, 100 * (epoch + 1)) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert tuple(ShuffledRows(100, seed=4).rows(0, 100)) not in {tuple(epoch) for epoch in epochs}


def test_any_piece_in_any_order_equals_the_whole():
    whole = ShuffledRows(37, seed=1).rows(0, 500)
    order = ShuffledRows(37, seed=1)
    rng = np.random.default_rng(0)
    for _ in range(200):
        start, stop = sorted(rng.integers(0, 501, 2))
        np.testing.assert_array_equal(order.rows(int(start), int(stop)), whole[start:stop])
    assert whole.dtype == np.int64
    assert len(order.rows(9, 9)) == 0


def test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks():
    step = ShuffledRows(1000, seed=0).rows(960, 1056)  # across an epoch's end
    for world_size in (1, 2, 3, 4, 8):
        parts = [rank_share(step, rank=rank, world_size=world_size) for rank in range(world_size)]
        np.testing.assert_array_equal(np.concatenate(parts), step)
        assert {len(part) for part in parts} == {96 // world_size}


def test_known_answer():
    """The order of a run must not change with the version of numpy: these rows were drawn with numpy 2.4."""
    known = [0, 3, 7, 5, 1, 2, 6, 4]
    assert permutation(8, 0, 0).tolist() == known
    assert permutation(8, 0, 1).tolist() != known


def test_epoch_of_a_position():
    order = ShuffledRows(10, seed=0)
    assert [order.epoch(position) for position in (0, 9, 10, 25)] == [0, 0, 1, 2]


def test_at_most_two_epochs_are_kept_in_memory():
    order = ShuffledRows(10, seed=0)
    order.rows(0, 1000)
    order.rows(5, 15)
    assert len(order._permutations) <= 2


def test_errors():
    with pytest.raises(DataError, match="there are no rows"):
        ShuffledRows(0, seed=0)
    with pytest.raises(ValueError, match=r"\[5, 3\) is not a range of positions"):
        ShuffledRows(10, seed=0).rows(5, 3)
    with pytest.raises(
        ConfigError, match=r"10 rows per step cannot be divided equally among 4 ranks; .* for example 12"
    ):
        rank_share(np.arange(10), rank=0, world_size=4)

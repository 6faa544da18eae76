"""Best fit: nothing lost, nothing too long, few rows."""

from __future__ import annotations

import numpy as np

from blocktrain.data.bin_packing import best_fit


def test_every_sequence_is_in_one_row_that_holds_it():
    lengths = np.random.default_rng(0).integers(1, 101, 500)
    rows = best_fit(lengths, 100)
    assert sorted(index for row in rows for index in row) == list(range(500))
    assert max(lengths[row].sum() for row in rows) <= 100
    assert len(rows) <= np.ceil(lengths.sum() / 100) * 11 / 9 + 1


def test_the_fullest_row_with_room_is_taken():
    assert best_fit([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert best_fit([10, 10], 10) == [[0], [1]]

"""Subsets are drawn without replacement and seen as often as configured; the order of rows is a pure function."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from blocktrain.data.sampling import RowPlan, Sampling, ShuffledRows, StepRows, rank_share
from blocktrain.errors import ConfigError, DataError
from blocktrain.runtime import permutation


def plan(num_rows: int = 60, rows_per_step: int = 4, seed: int = 0, **sampling: Any) -> RowPlan:
    return RowPlan(ShuffledRows(num_rows, seed=seed), Sampling(**sampling), rows_per_step=rows_per_step)


def visit(rows: RowPlan, steps: int, *, index: int = 0, sweep: int = 0, first: int = 0) -> list[StepRows]:
    """The steps of one visit; `first` is the run's step it begins with."""
    return [rows.step(step=first + at, visit=index, sweep=sweep, visit_step=at) for at in range(steps)]


def seen(steps: list[StepRows]) -> list[int]:
    return np.concatenate([step.rows for step in steps]).tolist()


# -- the whole run ----------------------------------------------------------------------------------------------------


def test_scope_run_is_one_stream_over_all_visits():
    """Each step continues where the step before it stopped, whatever visit it is in."""
    rows = plan(num_rows=10, rows_per_step=4)
    order = ShuffledRows(10, seed=0)
    for step in range(12):
        got = rows.step(step=step, visit=step // 3, sweep=step // 6, visit_step=step % 3)
        np.testing.assert_array_equal(got.rows, order.rows(4 * step, 4 * step + 4))
        np.testing.assert_array_equal(got.slots, got.rows)
        assert got.variant == 4 * step // 10
        assert got.rows.dtype == got.slots.dtype == np.int64
    assert rows.subset_rows == rows.num_slots == 10
    assert rows.subset(visit=7, sweep=2) == 0


# -- subsets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "num_rows", "rows_per_step", "expected"),
    [(0.2, 60, 4, 12), (0.25, 60, 4, 12), (1.0, 61, 4, 60), (0.29, 100, 1, 29), (0.7, 10, 7, 7), (0.1, 9999, 10, 990)],
)
def test_a_subset_is_as_many_whole_steps_as_fit_the_rate(rate: float, num_rows: int, rows_per_step: int, expected: int):
    """0.29 x 100 is 28.999999999999996 in floating point."""
    assert plan(num_rows, rows_per_step, scope="sweep", rate=rate).subset_rows == expected


def test_subsets_are_drawn_without_replacement_until_the_set_is_used_up():
    rows = plan(60, scope="sweep", rate=0.2)
    subsets = [rows.subset_indices(number) for number in range(15)]
    for epoch in range(3):
        drawn = np.concatenate(subsets[5 * epoch : 5 * epoch + 5])
        assert sorted(drawn.tolist()) == list(range(60))
    assert len({tuple(subset) for subset in subsets}) == 15


def test_every_row_comes_equally_often_even_if_subsets_do_not_divide_the_set():
    rows = plan(50, scope="visit", rate=0.3)  # subsets of 12
    drawn = Counter(np.concatenate([rows.subset_indices(number) for number in range(25)]).tolist())
    assert set(drawn.values()) == {6}
    assert len(drawn) == 50


@pytest.mark.parametrize("scope", ["sweep", "visit"])
def test_a_visit_passes_over_its_subset_in_a_different_order_in_each_pass(scope: str):
    rows = plan(60, scope=scope, rate=0.2)
    passes = [visit(rows, 9, index=4, sweep=1)[3 * at : 3 * at + 3] for at in range(3)]
    number = rows.subset(visit=4, sweep=1)
    for steps in passes:
        assert sorted(seen(steps)) == sorted(rows.subset_indices(number).tolist())
        assert sorted(np.concatenate([step.slots for step in steps]).tolist()) == list(range(12))
    assert len({tuple(seen(steps)) for steps in passes}) == 3


def test_scope_says_how_long_a_subset_lasts():
    by_sweep, by_visit = plan(scope="sweep", rate=0.2), plan(scope="visit", rate=0.2)
    places = [(index, index // 3) for index in range(6)]
    assert [by_sweep.subset(visit=index, sweep=sweep) for index, sweep in places] == [0, 0, 0, 1, 1, 1]
    assert [by_visit.subset(visit=index, sweep=sweep) for index, sweep in places] == [0, 1, 2, 3, 4, 5]
    shared = [frozenset(seen(visit(by_sweep, 3, index=index, sweep=sweep))) for index, sweep in places]
    assert len(set(shared)) == 2
    fresh = [frozenset(seen(visit(by_visit, 3, index=index, sweep=sweep))) for index, sweep in places]
    assert len(set(fresh)) == 6
    orders = [tuple(seen(visit(by_sweep, 3, index=index, sweep=0))) for index in range(3)]
    assert len(set(orders)) == 3  # equal rows, in a different order in each visit


def test_a_slot_always_means_the_same_row_of_a_subset():
    rows = plan(scope="sweep", rate=0.4)
    meaning: dict[int, int] = {}
    for index in range(3):
        for step in visit(rows, 12, index=index, sweep=2):
            for slot, row in zip(step.slots.tolist(), step.rows.tolist(), strict=True):
                assert meaning.setdefault(slot, row) == row
    assert len(meaning) == 24


def test_any_step_can_be_computed_alone():
    """No step depends on the steps that were computed before it, so a resumed run sees the rows of the original run."""
    whole = plan(scope="sweep", rate=0.2, variants=2)
    places = [(index, at) for index in range(4) for at in range(7)]
    expected = {place: whole.step(step=0, visit=place[0], sweep=place[0] // 2, visit_step=place[1]) for place in places}
    shuffled = [places[at] for at in np.random.default_rng(0).permutation(len(places))]
    again = plan(scope="sweep", rate=0.2, variants=2)
    for index, at in shuffled:
        got = again.step(step=99, visit=index, sweep=index // 2, visit_step=at)
        np.testing.assert_array_equal(got.rows, expected[index, at].rows)
        np.testing.assert_array_equal(got.slots, expected[index, at].slots)
        assert got.variant == expected[index, at].variant


def test_another_seed_draws_other_subsets_in_other_orders():
    one, other = plan(scope="sweep", rate=0.5, seed=1), plan(scope="sweep", rate=0.5, seed=2)
    assert one.subset_indices(0).tolist() != other.subset_indices(0).tolist()
    assert visit(one, 1)[0].slots.tolist() != visit(other, 1)[0].slots.tolist()


def test_known_answer():
    """The rows of a run must not change with the version of numpy: these rows were drawn with numpy 2.4."""
    rows = plan(12, 2, scope="sweep", rate=0.5)
    assert rows.subset_indices(1).tolist() == [1, 11, 2, 10, 6, 4]
    assert seen(visit(rows, 3, index=4, sweep=1)) == [2, 10, 1, 4, 6, 11]


def test_the_first_pass_and_an_epoch_have_different_orders():
    """numpy takes the seeds [s, 1] and [s, 1, 0, 0] as equal: once, the first pass of the first visit had the order of
    the second epoch."""
    rows = plan(60, 4, scope="visit", rate=1.0)
    first = np.concatenate([step.slots for step in visit(rows, 15)])
    assert np.random.SeedSequence([0, 1]).generate_state(4).tolist() == (
        np.random.SeedSequence([0, 1, 0, 0]).generate_state(4).tolist()
    )
    for epoch in range(10):
        assert first.tolist() != permutation(60, 0, epoch).tolist()


# -- variants ---------------------------------------------------------------------------------------------------------


def test_without_variants_every_pass_of_every_visit_has_new_augmentations():
    rows = plan(scope="sweep", rate=0.2)
    variants = [step.variant for index in range(4) for step in visit(rows, 9, index=index, sweep=0)]
    assert len(set(variants)) == 4 * 3
    assert all(len(set(variants[at : at + 3])) == 1 for at in range(0, 36, 3))  # one a pass


@pytest.mark.parametrize("variants", [1, 2, 3])
def test_variants_take_turns_within_a_subset_and_are_new_in_the_next(variants: int):
    rows = plan(scope="sweep", rate=0.2, variants=variants)
    assert rows.num_slots == 12 * variants
    for sweep in range(3):
        for index in range(2):
            steps = visit(rows, 3 * 4, index=2 * sweep + index, sweep=sweep)
            expected = [sweep * variants + turn % variants for turn in range(4) for _ in range(3)]
            assert [step.variant for step in steps] == expected
            for step in steps:
                kind = step.variant - sweep * variants
                assert (step.slots // 12 == kind).all()


def test_variants_of_the_whole_run_follow_the_epochs():
    rows = plan(num_rows=10, rows_per_step=5, variants=2)
    assert rows.num_slots == 20
    steps = [rows.step(step=step, visit=0, sweep=0, visit_step=step) for step in range(8)]
    assert [step.variant for step in steps] == [0, 0, 1, 1, 0, 0, 1, 1]
    for step in steps:
        np.testing.assert_array_equal(step.slots, step.rows + 10 * step.variant)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"variants": 3},
        {"scope": "sweep", "rate": 0.3},
        {"scope": "sweep", "rate": 0.3, "variants": 2},
        {"scope": "visit", "rate": 1.0, "variants": 1},
    ],
    ids=str,
)
def test_slot_rows_is_the_inverse_of_step(sampling: dict[str, Any]):
    rows = plan(num_rows=61, rows_per_step=4, **sampling)
    for step in range(100):
        index = step // 20
        got = rows.step(step=step, visit=index, sweep=index // 2, visit_step=step % 20)
        assert ((got.slots >= 0) & (got.slots < rows.num_slots)).all()
        back = rows.slot_rows(got.slots, subset=rows.subset(visit=index, sweep=index // 2))
        np.testing.assert_array_equal(back.rows, got.rows)
        np.testing.assert_array_equal(back.slots, got.slots)
        if rows.sampling.variants is not None:  # else nothing that differs by variant is ever stored
            assert back.variant == got.variant


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_slots_of_a_rank_are_those_of_its_own_cache(rank: int):
    """Each rank stores its part of a subset; its slots begin at 0 and have no holes."""
    sampling = Sampling(scope="sweep", rate=0.5)
    rows = RowPlan(ShuffledRows(60, seed=0), sampling, rows_per_step=6, rank=rank, ranks=3)
    parts = [rows.mine(step) for step in visit(rows, 5)]
    assert (
        sorted(np.concatenate([part.slots for part in parts]).tolist()) == list(range(rows.num_slots)) == [*range(10)]
    )
    for part in parts:
        np.testing.assert_array_equal(rows.slot_rows(part.slots, subset=0).rows, part.rows)


def test_slots_of_two_variants_cannot_be_one_batch():
    rows = plan(scope="sweep", rate=0.2, variants=2)
    with pytest.raises(ValueError, match="several variants"):
        rows.slot_rows(np.array([11, 12]), subset=0)
    assert len(rows.slot_rows(np.array([], np.int64), subset=0).rows) == 0


def test_micro_batches_are_the_parts_of_a_step():
    (step,) = visit(plan(rows_per_step=6, scope="sweep", rate=0.5, variants=2), 1)
    parts = step.split(2)
    assert [len(part.rows) for part in parts] == [2, 2, 2]
    np.testing.assert_array_equal(np.concatenate([part.rows for part in parts]), step.rows)
    np.testing.assert_array_equal(np.concatenate([part.slots for part in parts]), step.slots)
    assert {part.variant for part in parts} == {step.variant}


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scope": "sweep", "rate": 0.0}, r"rate must be in \(0, 1\], not 0\.0"),
        ({"scope": "sweep", "rate": 1.5}, r"rate must be in \(0, 1\], not 1\.5"),
        ({"scope": "sweep", "rate": float("nan")}, r"rate must be in \(0, 1\], not nan"),
        ({"rate": 0.5}, "a rate below 1 draws subsets: set scope = 'sweep' or 'visit'"),
        ({"variants": 0}, "variants must be at least 1, not 0"),
    ],
)
def test_bad_values(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)


def test_a_subset_smaller_than_a_step():
    with pytest.raises(ConfigError, match=r"rate = 0\.05 of 60 rows is less than one step of 4; raise rate or lower"):
        plan(60, 4, scope="sweep", rate=0.05)


# -- the order of rows -------------------------------------------------------------------------------------------------


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


def test_the_known_order():
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


def test_rows_that_cannot_be_shuffled_or_shared():
    with pytest.raises(DataError, match="there are no rows"):
        ShuffledRows(0, seed=0)
    with pytest.raises(ValueError, match=r"\[5, 3\) is not a range of positions"):
        ShuffledRows(10, seed=0).rows(5, 3)
    with pytest.raises(
        ConfigError, match=r"10 rows per step cannot be divided equally among 4 ranks; .* for example 12"
    ):
        rank_share(np.arange(10), rank=0, world_size=4)

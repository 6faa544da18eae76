"""Which block is visited when: the same on every machine, from any visit on."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from torch import nn

import blocktrain as bt
from blocktrain.chain.block import Block, Partition
from blocktrain.chain.partition import partition
from blocktrain.errors import ConfigError
from blocktrain.report.run import RunRecord
from blocktrain.schedule import Cyclic, Visit
from blocktrain.units import BatchGeometry, Duration

STEPS = Duration.steps(10)


@pytest.fixture
def three_blocks() -> Partition:
    return partition(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), num_blocks=3)


def order_of(schedule: Cyclic, blocks: Partition) -> list[int]:
    return [visit.block.index for visit in schedule.visits(blocks)]


def test_orders(three_blocks: Partition):
    assert order_of(Cyclic(visit=STEPS, sweeps=2), three_blocks) == [0, 1, 2, 0, 1, 2]
    assert order_of(Cyclic(visit=STEPS, sweeps=2, order="descending"), three_blocks) == [2, 1, 0, 2, 1, 0]
    assert order_of(Cyclic(visit=STEPS, sweeps=2, order=[0, 2, 1, 2]), three_blocks) == [0, 2, 1, 2, 0, 2, 1, 2]
    assert order_of(Cyclic(visit=STEPS, sweeps=1, order=(1,)), three_blocks) == [1]


def test_a_suffix_is_a_block_and_all_above_it(three_blocks: Partition):
    visits = list(Cyclic(visit=STEPS, sweeps=1, span="suffix").visits(three_blocks))
    assert [visit.block.members for visit in visits] == [(0, 1, 2), (1, 2), (2,)]
    assert [visit.block.index for visit in visits] == [0, 1, 2]
    assert visits[-1].block is three_blocks[2]


def test_shuffled_sweeps_are_permutations_and_change(three_blocks: Partition):
    schedule = Cyclic(visit=STEPS, order="shuffled", seed=3)
    sweeps = [schedule.blocks_of(sweep, 5) for sweep in range(20)]
    assert all(sorted(sweep) == [0, 1, 2, 3, 4] for sweep in sweeps)
    assert len({tuple(sweep) for sweep in sweeps}) > 10


def test_shuffled_order_is_a_function_of_the_seed_alone():
    def orders(seed: int) -> list[list[int]]:
        schedule = Cyclic(visit=STEPS, order="shuffled", seed=seed)
        return [schedule.blocks_of(sweep, 6) for sweep in range(4)]

    assert orders(0) == orders(0)
    assert orders(0) != orders(1)
    # Written down: another order on another machine or NumPy would break every resumed run.
    assert orders(0)[:2] == [[0, 3, 5, 1, 2, 4], [3, 4, 2, 1, 5, 0]]


def test_visits_know_their_place(three_blocks: Partition):
    last = list(Cyclic(visit=STEPS, sweeps=2).visits(three_blocks))[-1]
    assert (last.index, last.sweep, last.duration) == (5, 1, STEPS)
    assert last.block is three_blocks[2]


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled", (0, 2, 1, 2)])
def test_starting_later_gives_the_rest_of_the_same_visits(order, three_blocks: Partition):
    schedule = Cyclic(visit=STEPS, sweeps=3, order=order)
    places = [(visit.index, visit.sweep, visit.block) for visit in schedule.visits(three_blocks)]
    for start in range(len(places) + 2):
        rest = [(visit.index, visit.sweep, visit.block) for visit in schedule.visits(three_blocks, start=start)]
        assert rest == places[start:]


def test_the_first_visits_count_as_far_as_there_are_visits(three_blocks: Partition):
    geometry = BatchGeometry(tokens_per_step=8, rows_per_step=1, rows_per_epoch=8)
    first = [Duration.steps(count) for count in (1, 2, 3, 40, 50)]

    def most(first_visits: list[Duration], sweeps: int | None) -> int | None:
        return Cyclic(visit=STEPS, first_visits=first_visits, sweeps=sweeps).max_steps(three_blocks, geometry)

    assert [most(first, 1), most(first, 2), most(first[:2], 2), most(first, None)] == [6, 96 + 10, 3 + 4 * 10, None]


def test_without_sweeps_it_goes_on(three_blocks: Partition):
    visits = list(islice(Cyclic(visit=STEPS).visits(three_blocks), 3000))
    assert (visits[-1].sweep, visits[-1].block.index) == (999, 2)


def test_bad_values_are_named():
    with pytest.raises(ConfigError, match="sweeps must be at least 1, not 0"):
        Cyclic(visit=STEPS, sweeps=0)
    for length in (100, "5 steps"):
        with pytest.raises(ConfigError, match="a visit lasts a Duration, such as"):
            Cyclic(visit=length)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="order 'ascendin' is unknown; did you mean 'ascending'"):
        Cyclic(visit=STEPS, order="ascendin")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="span 'sufix' is unknown; did you mean 'suffix'"):
        Cyclic(visit=STEPS, span="sufix")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="order is an empty list; name at least one block"):
        Cyclic(visit=STEPS, order=[])


@pytest.mark.parametrize("block", [3, -1, "0", 1.0])
def test_an_order_that_names_no_block_of_the_partition(block, three_blocks: Partition):
    schedule = Cyclic(visit=STEPS, order=[0, block])
    with pytest.raises(ConfigError, match=rf"order names block {block!r}; the partition has blocks 0 to 2"):
        next(schedule.visits(three_blocks))


class EveryOther:
    """A schedule that is not the package's: the even blocks, `sweeps` times."""

    def __init__(self, *, visit: Duration, sweeps: int | None, seed: int, last_first: bool = False):
        self.visit, self.sweeps, self.last_first = visit, sweeps or 1, last_first

    def visits(self, partition: Partition, *, start: int = 0) -> Iterator[Visit]:
        blocks = [block for block in partition if block.index % 2 == 0]
        order = blocks[::-1] if self.last_first else blocks
        found = [(sweep, block) for sweep in range(self.sweeps) for block in order]
        for index, (sweep, block) in list(enumerate(found))[start:]:
            yield Visit(index=index, sweep=sweep, block=block, duration=self.visit)

    def trained(self, partition: Partition) -> list[Block]:
        return list(partition)

    def max_steps(self, partition: Partition, geometry: BatchGeometry) -> int | None:
        return len(list(self.visits(partition))) * self.visit.in_steps(geometry)

    def keeps_boundaries(self) -> bool:
        return self.last_first


def test_a_schedule_of_ones_own_is_named_in_the_configuration(tiny, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "my_schedules", sys.modules[__name__])
    settings = ["schedule.kind=my_schedules:EveryOther", "schedule.options.last_first=true", "prefix.store=host"]
    run = RunRecord.load(bt.run(tiny(*settings, "schedule.visit=2 steps"), tmp_path / "run").path)
    assert [visit.block for visit in run.visits] == [2, 0]
    assert run.header.steps_planned == run.steps_done == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule.kind=cyclik"], "schedule.kind = 'cyclik' is unknown; did you mean 'cyclic'"),
        (["schedule.kind=no_such_module:Mine"], "module 'no_such_module' cannot be imported"),
        (["schedule.kind=json:Mine"], "module 'json' has no 'Mine'"),
        (["schedule.kind=my_schedules:EveryOther", "schedule.options.loud=true"], "refuses its options"),
        (["schedule.kind=my_schedules:EveryOther", "schedule.order=descending"], "takes options, not order"),
        (["schedule.options.loud=true"], "options are for a schedule of your own"),
    ],
)
def test_a_schedule_that_cannot_be_had_says_why(tiny, monkeypatch, overrides: list[str], message: str) -> None:
    monkeypatch.setitem(sys.modules, "my_schedules", sys.modules[__name__])
    with pytest.raises(ConfigError, match=re.escape(message)):
        tiny(*overrides)

"""Which block is visited when. A schedule is data: it lists visits, it does not run them.

Cyclic, M = 3          sweep 0      sweep 1
ascending              0 1 2        0 1 2
descending             2 1 0        2 1 0
shuffled               1 0 2        2 0 1     (seeded: the same on every rank)
fixed "0 2 1 2"        0 2 1 2      0 2 1 2

What a visit to block 1 trains, M = 4     0  1  2  3
span "block"                              .  x  .  .
span "suffix"                             .  x  x  x    activation gradients reach these blocks anyway
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from blocktrain.chain.block import Block, Partition
from blocktrain.dotted_path import find_by_path
from blocktrain.errors import ConfigError, nearest
from blocktrain.runtime import permutation
from blocktrain.units import BatchGeometry, Duration

Order = Literal["ascending", "descending", "shuffled"]
Span = Literal["block", "suffix"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Visit:
    """One stay at a block, from activation to retirement.

    index, sweep: counted over the whole run, from 0 on.
    block: what is trained: a block of the partition, or a union of several.
    duration: the longest it may last.
    """

    index: int
    sweep: int
    block: Block
    duration: Duration


class Schedule(Protocol):
    """The order and the length of a run's visits. It must be a function of its own fields alone: every rank, and every
    session of a resumed run, asks again and has to get the same visits."""

    def visits(self, partition: Partition, *, start: int = 0) -> Iterator[Visit]:
        """The run's visits from the `start`-th on, in order. Visits of one sweep share a sampled subset of the rows.
        Raises `ConfigError` where the schedule does not fit the partition."""
        ...

    def trained(self, partition: Partition) -> list[Block]:
        """What a visit to each block trains, by the block's index."""
        ...

    def max_steps(self, partition: Partition, geometry: BatchGeometry) -> int | None:
        """The most optimizer steps that all visits may take together; None where they never end."""
        ...

    def keeps_boundaries(self) -> bool:
        """Whether every visit of a sweep begins below the one before. A boundary that the first visit stores is then
        still valid when a later visit of the sweep needs it, so a prefix cache keeps them all."""
        ...


@dataclass(frozen=True, kw_only=True)
class Cyclic:
    """Every block once a sweep (paper Algorithm 1, line 4), or as often as a fixed list names it.

    order: `"ascending"` (default: from random weights, descending order never recovered in our measurements),
        `"descending"`, `"shuffled"` (a new permutation each sweep, from `seed`), or a list of block indices.
    visit: the longest a visit may last; a local-convergence rule may end it sooner.
    first_visits: the same of the run's first visits, in turn, where they are to be longer or shorter.
    sweeps: how many; None goes on until the run's own criterion stops it.
    span: what a visit trains: its `"block"`, or the `"suffix"` that begins with it, every block above included. A
        suffix takes the memory of all these blocks: that of the whole model at block 0.
    """

    visit: Duration
    first_visits: Sequence[Duration] = ()
    sweeps: int | None = None
    order: Order | Sequence[int] = "ascending"
    span: Span = "block"
    seed: int = 0

    def __post_init__(self) -> None:
        for length in (self.visit, *self.first_visits):
            if not isinstance(length, Duration):
                raise ConfigError(f"a visit lasts a Duration, such as bt.Duration.steps(100), not {length!r}")
        if self.sweeps is not None and self.sweeps < 1:
            raise ConfigError(f"sweeps must be at least 1, not {self.sweeps}")
        if isinstance(self.order, str):
            if self.order not in get_args(Order):
                raise ConfigError(f"order '{self.order}' is unknown; {nearest(self.order, get_args(Order))}")
        elif not self.order:
            raise ConfigError("order is an empty list; name at least one block")
        if self.span not in get_args(Span):
            raise ConfigError(f"span '{self.span}' is unknown; {nearest(self.span, get_args(Span))}")

    def blocks_of(self, sweep: int, num_blocks: int) -> list[int]:
        """Indices of the blocks visited in a sweep, in order."""
        match self.order:
            case "ascending":
                return list(range(num_blocks))
            case "descending":
                return list(range(num_blocks))[::-1]
            case "shuffled":
                return permutation(num_blocks, self.seed, sweep).tolist()
            case listed:
                for index in listed:
                    if not (isinstance(index, int) and 0 <= index < num_blocks):
                        raise ConfigError(
                            f"order names block {index!r}; the partition has blocks 0 to {num_blocks - 1}"
                        )
                return [int(index) for index in listed]

    def duration(self, visit: int) -> Duration:
        """The longest that the run's `visit`-th visit may last."""
        return self.first_visits[visit] if visit < len(self.first_visits) else self.visit

    def max_steps(self, partition: Partition, geometry: BatchGeometry) -> int | None:
        """See `Schedule`."""
        if self.sweeps is None:
            return None
        visits = self.sweeps * len(self.blocks_of(0, len(partition)))
        return sum(self.duration(visit).in_steps(geometry) for visit in range(visits))

    def keeps_boundaries(self) -> bool:
        """See `Schedule`."""
        return self.order == "descending"

    def trained(self, partition: Partition) -> list[Block]:
        """What a visit to each block trains, by the block's index."""
        whole = self.span == "suffix"
        return [partition.suffix(index) if whole else partition[index] for index in range(len(partition))]

    def visits(self, partition: Partition, *, start: int = 0) -> Iterator[Visit]:
        """The run's visits from the `start`-th on; endless where `sweeps` is None."""
        index, trained = 0, self.trained(partition)
        for sweep in itertools.count() if self.sweeps is None else range(self.sweeps):
            for block in self.blocks_of(sweep, len(partition)):
                if index >= start:
                    yield Visit(index=index, sweep=sweep, block=trained[block], duration=self.duration(index))
                index += 1


SCHEDULES: dict[str, type[Schedule]] = {"cyclic": Cyclic}  # the values of `schedule.kind` that need no dotted path


def make_schedule(kind: str, **options: Any) -> Schedule:
    """A schedule by its name in `SCHEDULES`, or by the dotted path of its class, `"package.module:Class"`.

    Raises `ConfigError` for an unknown name, a path that cannot be imported, or options that the class refuses.
    """
    if kind not in SCHEDULES and not {".", ":"} & set(kind):
        raise ConfigError(
            f"schedule.kind = '{kind}' is unknown; {nearest(kind, SCHEDULES)}. A class of your own is "
            "'package.module:Class'"
        )
    cls = SCHEDULES.get(kind) or find_by_path(kind, key="schedule.kind")
    try:
        return cls(**options)
    except TypeError as error:
        raise ConfigError(f"schedule.kind = '{kind}' refuses its options: {error}") from None

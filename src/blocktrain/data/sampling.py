"""Which rows a step sees: the whole set epoch by epoch, or a new subset for each sweep or visit (paper 3.2.3).

The rows come from one endless stream of permutations, a function of the seed and of an integer position:

    position     0 ........ n-1 | n ....... 2n-1 | 2n ...
    rows         permutation 0  | permutation 1  | permutation 2 ...     (n rows, each once per epoch)
    one step     [ rank 0 | rank 1 | ... ]   `rank_share` of the rows of the step

    scope = "run"      a visit continues in the stream where the last one stopped
    scope = "sweep"    subset s = positions [s n, (s + 1) n) of the stream; every visit of sweep s passes over it
    scope = "visit"    as "sweep", with a new subset for each visit

    subset   [ 7 2 9 4 1 8 ]                 n = rate x rows, whole steps
    slot       0 1 2 3 4 5                   position in the subset; a prefix cache stores rows by slot
    lane       0 1 2 0 1 2                   position in a step of 3 rows; the lane of a slot never changes
    pass 0     3 1 5 | 0 4 2                 each pass shuffles the slots of each lane

The stream is drawn without replacement until the set is used up. Everything is a function of the seed and of the
position in the run, so a checkpoint stores only the position, and a resumed run sees the rows that it would have seen.

Several ranks divide the rows of a step by lanes. So the rows of a step do not depend on the number of ranks, and each
rank sees its own slots again in every pass and visit: it reads from its prefix cache what it has stored there itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from blocktrain.errors import ConfigError, DataError
from blocktrain.runtime import permutation, permutations


class ShuffledRows:
    """An endless stream of row indices, one seeded permutation after another, with random access."""

    def __init__(self, num_rows: int, *, seed: int):
        """Shuffle rows [0, num_rows); raises `DataError` if there are none."""
        if num_rows < 1:
            raise DataError("there are no rows to shuffle")
        self.num_rows = num_rows
        self.seed = seed
        self._permutations: dict[int, np.ndarray] = {}  # at most two epochs: 16 bytes per row

    def epoch(self, position: int) -> int:
        """How many times every row has been seen before `position`."""
        return position // self.num_rows

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The rows at positions [start, stop), int64 (stop - start,)."""
        if not 0 <= start <= stop:
            raise ValueError(f"[{start}, {stop}) is not a range of positions")
        pieces = [np.empty(0, np.int64)]
        while start < stop:
            epoch, place = divmod(start, self.num_rows)
            if epoch not in self._permutations:
                kept = {other: rows for other, rows in self._permutations.items() if other == epoch - 1}
                self._permutations = {**kept, epoch: permutation(self.num_rows, self.seed, epoch)}
            pieces.append(self._permutations[epoch][place : place + stop - start])
            start += len(pieces[-1])
        return np.concatenate(pieces)


def rank_share(indices: np.ndarray, *, rank: int, world_size: int) -> np.ndarray:
    """The part of a step's rows that `rank` of `world_size` works on: equal, contiguous parts in the order of ranks.

    Raises `ConfigError` if the rows cannot be divided equally.

    >>> rank_share(np.arange(6), rank=1, world_size=3)
    array([2, 3])
    """
    count, rest = divmod(len(indices), world_size)
    if rest:
        raise ConfigError(
            f"{len(indices)} rows per step cannot be divided equally among {world_size} ranks; make it a multiple of "
            f"{world_size}, for example {(count + 1) * world_size}"
        )
    return indices[rank * count : (rank + 1) * count]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How much of the training set is drawn, and how often a new subset is drawn.

    scope: how long a subset lasts; "run" uses all rows for the whole run.
    rate: the share of the rows in a subset (the paper's SR); 1 with scope "run".
    variants: how many augmentations of each image there are. None: each pass draws new ones, so nothing can be cached.
        K: K augmentations are used again for as long as the subset lasts (1: the augmentation is frozen).
    """

    scope: Literal["run", "sweep", "visit"] = "run"
    rate: float = 1.0
    variants: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ConfigError(f"rate must be in (0, 1], not {self.rate}")
        if self.scope == "run" and self.rate != 1:
            raise ConfigError("a rate below 1 draws subsets: set scope = 'sweep' or 'visit'")
        if self.variants is not None and self.variants < 1:
            raise ConfigError(f"variants must be at least 1, not {self.variants}")


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRows:
    """The rows of one step, all int64 (rows per step,)."""

    rows: np.ndarray  # indices into the training set
    slots: np.ndarray  # their positions in a prefix cache, in [0, number of slots)
    variant: int  # which augmentation of them

    def split(self, count: int) -> list[StepRows]:
        """Consecutive parts of `count` rows each."""
        starts = range(0, len(self.rows), count)
        return [
            StepRows(rows=self.rows[at : at + count], slots=self.slots[at : at + count], variant=self.variant)
            for at in starts
        ]


class RowPlan:
    """The rows of every step of a run, and which of them belong to this rank.

    rank, ranks: the number of this process and of all processes; `ranks` must divide `rows_per_step`.
    """

    def __init__(self, order: ShuffledRows, sampling: Sampling, *, rows_per_step: int, rank: int = 0, ranks: int = 1):
        self.order = order
        self.sampling = sampling
        self.rows_per_step = rows_per_step
        # The lanes of each rank, and those of this rank.
        self._all_lanes = [rank_share(np.arange(rows_per_step), rank=at, world_size=ranks) for at in range(ranks)]
        self._lanes = self._all_lanes[rank]
        self._shared = sampling.scope != "run" and ranks > 1
        whole_steps = int(sampling.rate * order.num_rows + 1e-9) // rows_per_step  # 0.29 x 100 is 28.999999999999996
        if sampling.scope != "run" and whole_steps < 1:
            raise ConfigError(
                f"[sampling] rate = {sampling.rate:g} of {order.num_rows} rows is less than one step of "
                f"{rows_per_step}; raise rate or lower batch.rows"
            )
        self._subset: tuple[int, np.ndarray] | None = None  # the last subset that was requested
        self._pass: tuple[tuple[int, int], np.ndarray] | None = None
        self.subset_rows = order.num_rows if sampling.scope == "run" else whole_steps * rows_per_step

    @property
    def stored_rows(self) -> int:
        """The number of rows of a subset that this rank sees: with scope "run", where it may see any row, all."""
        return self.subset_rows // self.rows_per_step * len(self._lanes) if self._shared else self.subset_rows

    @property
    def num_slots(self) -> int:
        """The number of entries that this rank's prefix cache needs: `stored_rows` times the number of variants."""
        return self.stored_rows * (self.sampling.variants or 1)

    def mine(self, rows: StepRows) -> StepRows:
        """This rank's part of the rows of a step, with their slots in this rank's cache."""
        return self._in_lanes(self._lanes, rows)

    def in_turn(self, rows: StepRows, count: int) -> list[StepRows]:
        """The rows of a step in parts of `count`: the first part of each rank, then the second of each, and so on; each
        part has its slots in its own rank's cache."""
        by_rank = [self._in_lanes(lanes, rows).split(count) for lanes in self._all_lanes]
        return [part for parts in zip(*by_rank, strict=True) for part in parts]

    def _in_lanes(self, lanes: np.ndarray, rows: StepRows) -> StepRows:
        slots = rows.slots[lanes]
        if self._shared:
            turn, lane = divmod(slots, self.rows_per_step)
            slots = turn * len(lanes) + lane - lanes[0]
        return StepRows(rows=rows.rows[lanes], slots=slots, variant=rows.variant)

    def subset(self, *, visit: int, sweep: int) -> int:
        """The number of the subset that a visit draws from. Cached rows of one subset are of no use in another."""
        match self.sampling.scope:
            case "run":
                return 0
            case "sweep":
                return sweep
            case "visit":
                return visit

    def step(self, *, step: int, visit: int, sweep: int, visit_step: int) -> StepRows:
        """The rows of `step` of the run, which is step `visit_step` of its visit; both count from 0."""
        count, variants = self.rows_per_step, self.sampling.variants
        if self.sampling.scope == "run":
            rows = self.order.rows(step * count, (step + 1) * count)
            epoch = self.order.epoch(step * count)
            variant = epoch if variants is None else epoch % variants
            return StepRows(rows=rows, slots=self._slots(rows, variant), variant=variant)
        subset = self.subset(visit=visit, sweep=sweep)
        turn, place = divmod(visit_step * count, self.subset_rows)
        order = self._turn(visit, turn)[place : place + count]
        rows = self.subset_indices(subset)[order]
        if variants is None:
            variant = (visit << 20) + turn  # a new augmentation in every pass of every visit
            return StepRows(rows=rows, slots=order, variant=variant)
        return StepRows(
            rows=rows, slots=self._slots(order, turn % variants), variant=subset * variants + turn % variants
        )

    def subset_indices(self, subset: int) -> np.ndarray:
        """The rows of a subset in slot order, int64 (subset_rows,)."""
        if self._subset is None or self._subset[0] != subset:
            start = subset * self.subset_rows
            whole = self.sampling.scope == "run"
            rows = np.arange(self.order.num_rows) if whole else self.order.rows(start, start + self.subset_rows)
            self._subset = (subset, rows)
        return self._subset[1]

    def slot_rows(self, slots: np.ndarray, *, subset: int) -> StepRows:
        """The rows that belong in `slots` of this cache: the inverse of `step` and `mine`, to fill it ahead of time.

        Raises `ValueError` if the slots belong to several variants.
        """
        turn, places = divmod(slots, self.stored_rows)
        if len(turn) and (turn != turn[0]).any():
            raise ValueError("the slots belong to several variants")
        number = int(turn[0]) if len(turn) else 0
        variant = number if self.sampling.scope == "run" else subset * (self.sampling.variants or 1) + number
        if self._shared:
            step, lane = divmod(places, len(self._lanes))
            places = step * self.rows_per_step + lane + self._lanes[0]
        return StepRows(rows=self.subset_indices(subset)[places], slots=slots, variant=variant)

    def _turn(self, visit: int, turn: int) -> np.ndarray:
        """The slots of one pass of a visit over its subset, in order: each step has one slot of every lane.

        The last number of the seed distinguishes it from the order of an epoch, because numpy takes missing numbers of
        a seed as zeros.
        """
        if self._pass is None or self._pass[0] != (visit, turn):
            count = self.rows_per_step
            steps = permutations(self.subset_rows // count, count, self.order.seed, visit, turn, 1)
            self._pass = ((visit, turn), (steps * count + np.arange(count)).reshape(-1))
        return self._pass[1]

    def _slots(self, places: np.ndarray, variant: int) -> np.ndarray:
        return places + self.subset_rows * variant if self.sampling.variants is not None else places

"""Which rows a step sees: the whole set epoch by epoch, or a fresh subset for each sweep or visit (paper 3.2.3).

    scope = "run"      one endless stream; a visit goes on where the last one stopped
    scope = "sweep"    subset s = positions [s n, (s + 1) n) of the stream; every visit of sweep s passes over it
    scope = "visit"    likewise, a fresh subset each visit

    subset   [ 7 2 9 4 1 8 ]                 n = rate x rows, whole steps
    slot       0 1 2 3 4 5                   place in the subset: what a prefix cache stores
    lane       0 1 2 0 1 2                   place in a step, steps of 3 rows: a slot keeps it
    pass 0     3 1 5 | 0 4 2                 each pass shuffles each lane

The stream is drawn without replacement until the set is used up. Everything is a function of the seed and of where
the run stands, so a resumed run sees the same rows.

Several ranks share a step's rows by lanes, so the rows of a step do not depend on how many ranks there are, and each
rank sees the same slots again in every pass and visit: it reads from its prefix cache what it has itself put there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from blocktrain.data.shuffle import ShuffledRows, rank_share
from blocktrain.errors import ConfigError
from blocktrain.runtime import permutations


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How much of the training set is drawn, and how often anew.

    scope: how long a subset lasts; "run" is all rows for the whole run.
    rate: share of the rows in a subset (the paper's SR); 1 with scope "run".
    variants: of augmented images: None augments anew in every pass, so that nothing can be cached; K reuses K
        augmentations of each image for as long as its subset lasts (1: the augmentation is frozen).
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
    slots: np.ndarray  # where a cache keeps them, in [0, number of slots)
    variant: int  # which augmentation

    def split(self, count: int) -> list[StepRows]:
        """Parts of `count` rows each, in order."""
        starts = range(0, len(self.rows), count)
        return [
            StepRows(rows=self.rows[at : at + count], slots=self.slots[at : at + count], variant=self.variant)
            for at in starts
        ]


class RowPlan:
    """The rows of every step of a run, and which of them are this rank's.

    rank, ranks: which of how many processes; their number must divide `rows_per_step`.
    """

    def __init__(self, order: ShuffledRows, sampling: Sampling, *, rows_per_step: int, rank: int = 0, ranks: int = 1):
        self.order = order
        self.sampling = sampling
        self.rows_per_step = rows_per_step
        # Of each rank its places in a step, and of this one.
        self._all_lanes = [rank_share(np.arange(rows_per_step), rank=at, world_size=ranks) for at in range(ranks)]
        self._lanes = self._all_lanes[rank]
        self._shared = sampling.scope != "run" and ranks > 1
        whole_steps = int(sampling.rate * order.num_rows + 1e-9) // rows_per_step  # 0.29 x 100 is 28.999999999999996
        if sampling.scope != "run" and whole_steps < 1:
            raise ConfigError(
                f"[sampling] rate = {sampling.rate:g} of {order.num_rows} rows is less than one step of "
                f"{rows_per_step}; raise rate or lower batch.rows"
            )
        self._subset: tuple[int, np.ndarray] | None = None  # the last one asked for
        self._order: tuple[tuple[int, int], np.ndarray] | None = None
        self.subset_rows = order.num_rows if sampling.scope == "run" else whole_steps * rows_per_step

    @property
    def stored_rows(self) -> int:
        """Rows of a subset that come to this rank; with scope "run", where any row may come, all."""
        return self.subset_rows // self.rows_per_step * len(self._lanes) if self._shared else self.subset_rows

    @property
    def num_slots(self) -> int:
        """These, times variants of each, are what this rank's cache must have room for."""
        return self.stored_rows * (self.sampling.variants or 1)

    def mine(self, rows: StepRows) -> StepRows:
        """This rank's part of a step's rows, with their slots in its own cache."""
        return self._of(self._lanes, rows)

    def in_turn(self, rows: StepRows, count: int) -> list[StepRows]:
        """The step's rows in parts of `count`: the first part of each rank, then the second of each, and so on; each
        with its slots in that rank's cache."""
        by_rank = [self._of(lanes, rows).split(count) for lanes in self._all_lanes]
        return [part for parts in zip(*by_rank, strict=True) for part in parts]

    def _of(self, lanes: np.ndarray, rows: StepRows) -> StepRows:
        slots = rows.slots[lanes]
        if self._shared:
            turn, lane = divmod(slots, self.rows_per_step)
            slots = turn * len(lanes) + lane - lanes[0]
        return StepRows(rows=rows.rows[lanes], slots=slots, variant=rows.variant)

    def subset(self, *, visit: int, sweep: int) -> int:
        """Number of the subset a visit draws from; what is cached of one subset says nothing of another."""
        match self.sampling.scope:
            case "run":
                return 0
            case "sweep":
                return sweep
            case "visit":
                return visit

    def step(self, *, step: int, visit: int, sweep: int, visit_step: int) -> StepRows:
        """The rows of 0-based `step`, the `visit_step`-th of its visit."""
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
            variant = (visit << 20) + turn  # another augmentation in every pass of every visit
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
        """What belongs into `slots` of this rank's cache (all of one variant): the inverse of `step` and `mine`, for
        filling a cache ahead."""
        turn, places = divmod(slots, self.stored_rows)
        if len(turn) and (turn != turn[0]).any():
            raise ValueError("slots of several variants at once")
        kind = int(turn[0]) if len(turn) else 0
        variant = kind if self.sampling.scope == "run" else subset * (self.sampling.variants or 1) + kind
        if self._shared:
            step, lane = divmod(places, len(self._lanes))
            places = step * self.rows_per_step + lane + self._lanes[0]
        return StepRows(rows=self.subset_indices(subset)[places], slots=slots, variant=variant)

    def _turn(self, visit: int, turn: int) -> np.ndarray:
        """The slots of one pass of one visit over its subset, in order: in each step one of every lane. The last number
        of the seed tells it from an epoch's order: missing numbers of a numpy seed count as zeros."""
        if self._order is None or self._order[0] != (visit, turn):
            count = self.rows_per_step
            steps = permutations(self.subset_rows // count, count, self.order.seed, visit, turn, 1)
            self._order = ((visit, turn), (steps * count + np.arange(count)).reshape(-1))
        return self._order[1]

    def _slots(self, places: np.ndarray, variant: int) -> np.ndarray:
        return places + self.subset_rows * variant if self.sampling.variants is not None else places

"""What a prefix cache did, its records added up: over a run, by block, and the reasons it was used or not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blocktrain.report.records import CacheChoice, CacheUse
from blocktrain.report.run import RunRecord

_FIGURE = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class CacheTotals:
    """What the cache did in some visits; `bytes` is the most it held at once, all else is summed.

    `flops_saved` is net of what filling cost. `seconds_saved` is the trainer's estimate: those FLOPs at the rate it
    measured, less the waiting. `encoding_error` is the largest, relative.
    """

    visits: int
    places: tuple[str, ...]
    dtypes: tuple[str, ...]
    bytes: int
    rows: int
    hits: int
    stale: int
    damaged: int
    fill_seconds: float
    wait_seconds: float
    seconds_saved: float
    flops_saved: int
    encoding_error: float

    @property
    def hit_rate(self) -> float | None:
        """Share of the rows asked for that were found stored; None where none was asked for."""
        return self.hits / self.rows if self.rows else None


def totals(uses: Sequence[CacheUse]) -> CacheTotals:
    """The records of at least one visit added up."""
    return CacheTotals(
        visits=len({use.visit for use in uses}),
        places=tuple(dict.fromkeys(use.place for use in uses)),
        dtypes=tuple(dict.fromkeys(use.dtype for use in uses)),
        bytes=max(use.bytes for use in uses),
        rows=sum(use.rows for use in uses),
        hits=sum(use.hits for use in uses),
        stale=sum(use.stale for use in uses),
        damaged=sum(use.damaged for use in uses),
        fill_seconds=sum(use.fill_seconds for use in uses),
        wait_seconds=sum(use.wait_seconds for use in uses),
        seconds_saved=sum(use.seconds_saved for use in uses),
        flops_saved=sum(use.flops_saved for use in uses),
        encoding_error=float(np.max([use.encoding_error for use in uses])),  # unlike max(), keeps a nan
    )


def by_block(uses: Sequence[CacheUse]) -> dict[int, CacheTotals]:
    """The same for each block that was cached, in order."""
    blocks = sorted({use.block for use in uses})
    return {block: totals([use for use in uses if use.block == block]) for block in blocks}


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why the prefix was stored where it was, or not at all, and in how many visits.

    `text` is that of the first of these visits; the others' may differ in their `figures`.
    """

    place: str | None
    text: str
    visits: int
    figures_differ: bool


def reasons(choices: Sequence[CacheChoice]) -> list[Reason]:
    """Distinct reasons, in the order they first came up.

    What is measured anew at each visit differs a little each time, so texts that differ only in figures are one.
    """
    groups: dict[tuple[str | None, str], list[CacheChoice]] = {}
    for choice in choices:
        groups.setdefault((choice.place, _FIGURE.sub("#", choice.reason)), []).append(choice)
    return [
        Reason(
            place=place,
            text=group[0].reason,
            visits=len(group),
            figures_differ=any(choice.reason != group[0].reason for choice in group),
        )
        for (place, _), group in groups.items()
    ]


def given_up(run: RunRecord) -> int:
    """Visits that began with a cache and ended without one: they have no record of what it did."""
    chosen = {choice.visit for choice in run.cache_choices if choice.place is not None}
    ended = {row.visit for row in run.retirements}
    return len(chosen & ended - {use.visit for use in run.cache_uses})

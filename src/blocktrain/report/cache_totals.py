"""The records of the prefix cache added up: over a run, by block, and the reasons why it was used or not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from blocktrain.records.run_records import CacheDecision, CacheUse
from blocktrain.report.run import RunRecord

_FIGURE = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class CacheTotals:
    """What the cache did in some visits: sums, except where another meaning is given.

    bytes: the most that was stored at once. flops_saved: net of what filling the cache cost. seconds_saved: the
    trainer's estimate, these FLOPs at the rate it measured, less the waiting. encoding_error: the largest, relative.
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
        """Share of the requested rows that were found stored; None where none was requested."""
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
    """The totals of each block that was cached, in the order of the blocks."""
    blocks = sorted({use.block for use in uses})
    return {block: totals([use for use in uses if use.block == block]) for block in blocks}


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why the prefix was stored where it was, or not at all, and in how many visits.

    `text` is the reason in the first of these visits; where `figures_differ`, the others state other figures.
    """

    place: str | None
    text: str
    visits: int
    figures_differ: bool


def reasons(decisions: Sequence[CacheDecision]) -> list[Reason]:
    """The distinct reasons, in the order in which they first came up.

    Each visit measures again, with slightly different results, so texts that differ only in figures count as one.
    """
    groups: dict[tuple[str | None, str], list[CacheDecision]] = {}
    for decision in decisions:
        groups.setdefault((decision.place, _FIGURE.sub("#", decision.reason)), []).append(decision)
    return [
        Reason(
            place=place,
            text=group[0].reason,
            visits=len(group),
            figures_differ=any(decision.reason != group[0].reason for decision in group),
        )
        for (place, _), group in groups.items()
    ]


def abandoned(run: RunRecord) -> int:
    """How many visits began with a cache and ended without one: they have no record of what it did."""
    cached = {decision.visit for decision in run.cache_decisions if decision.place is not None}
    ended = {row.visit for row in run.visit_ends}
    return len(cached & ended - {use.visit for use in run.cache_uses})

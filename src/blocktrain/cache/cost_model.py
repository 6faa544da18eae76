"""Decides whether a prefix cache pays, and in which store, by arithmetic over measured rates; it gives the reason, too.

For one row, in seconds, summed over this visit and the later ones that share its rows:

    without     uses x (FLOPs of the prefix / rate)
    with        FLOPs of filling / rate  +  bytes / write rate  +  uses x bytes / read rate

Filling a row that the visit before has stored costs only the layers in between. A row costs as much to fill as to run
if it is used once, nothing of it is stored, and no later visit uses it: then the cache can only lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blocktrain.cache.store import STORES
from blocktrain.probe import Medium
from blocktrain.units import format_bytes

# The share of the free space that the cache leaves free, by medium: on a device for the rest of the training step, on
# the host and the disk for other programs.
KEPT_FREE: Mapping[str, float] = {"device": 0.5, "host": 0.5, "file": 0.1}


@dataclass(frozen=True, kw_only=True)
class VisitReuse:
    """How one visit uses each row."""

    uses: float  # how often its steps request the row; below 1 where they do not reach all rows
    prefix_flops: int  # from the inputs to the boundary
    fill_flops: float  # from what is stored when the visit begins, averaged over the rows


@dataclass(frozen=True, kw_only=True)
class CacheFacts:
    """What the decision depends on, all counted or measured. Mappings are by medium (see `StoreKind`)."""

    visits: Sequence[VisitReuse]  # this visit, and the later ones that use the same rows
    num_slots: int
    row_bytes: int  # at one boundary
    boundaries: int = 1  # how many are stored at once, all written by one pass
    flops_per_second: float
    read_bytes_per_second: Mapping[Medium, float]
    write_bytes_per_second: Mapping[Medium, float]
    free_bytes: Mapping[Medium, float]


@dataclass(frozen=True, kw_only=True)
class StoreChoice:
    """Which of `STORES` the cache uses (None: there is no cache) and why."""

    place: str | None
    reason: str


def choose(facts: CacheFacts, wanted: str = "auto") -> StoreChoice:
    """The first of `STORES` that fits and pays. One that is `wanted` by name is taken whether it pays or not."""
    if wanted != "auto":
        place = wanted if wanted in STORES else None
        return StoreChoice(place=place, reason=f"store = '{wanted}' in the configuration")
    if not facts.visits[0].prefix_flops:
        return StoreChoice(place=None, reason="cannot pay: the prefix costs no FLOPs")
    without = facts.num_slots * sum(visit.uses * visit.prefix_flops for visit in facts.visits) / facts.flops_per_second
    fill_flops = facts.num_slots * sum(min(1.0, visit.uses) * visit.fill_flops for visit in facts.visits)
    fill_seconds = fill_flops / facts.flops_per_second
    if fill_seconds >= without:
        uses = facts.visits[0].uses
        used = "once" if uses == 1 else f"{uses:.2g} times"
        reason = (
            f"cannot pay: each row is used {used} in the visit and no later visit sees it again; repeat rows within "
            "a visit (schedule.visit = '2 epochs' of a [sampling] subset) or share a subset over a sweep "
            "(scope = 'sweep')"
        )
        return StoreChoice(place=None, reason=reason)
    # How often each visit writes a row: once for each stored boundary if it computes the row, never if it finds it.
    writes = [min(1.0, visit.uses) * facts.boundaries if visit.fill_flops else 0.0 for visit in facts.visits]
    boundary_bytes = facts.num_slots * facts.row_bytes
    total_bytes = boundary_bytes * facts.boundaries
    refused = []
    for place, kind in STORES.items():
        if kind.medium not in facts.free_bytes:
            continue
        room = max(0.0, facts.free_bytes[kind.medium] * (1 - KEPT_FREE[kind.medium]))
        if total_bytes > room:
            refused.append(f"{place} has room for {format_bytes(room)} of {format_bytes(total_bytes)}")
            continue
        if kind.medium not in facts.read_bytes_per_second:
            refused.append(f"{place} could not be written to")
            continue
        read_rate = facts.read_bytes_per_second[kind.medium]
        write_rate = facts.write_bytes_per_second[kind.medium]
        pairs = zip(writes, facts.visits, strict=True)
        seconds_per_byte = sum(written / write_rate + visit.uses / read_rate for written, visit in pairs)
        seconds = fill_seconds + boundary_bytes * seconds_per_byte
        if seconds < without:
            reason = f"{place}: {seconds:.3g} s of filling and reading instead of {without:.3g} s of prefix passes"
            return StoreChoice(place=place, reason=reason)
        refused.append(f"{place} would take {seconds:.3g} s instead of {without:.3g} s")
    return StoreChoice(place=None, reason="does not pay: " + "; ".join(refused))

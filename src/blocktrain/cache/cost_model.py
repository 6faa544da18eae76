"""Does a prefix cache pay, and where should it lie? Arithmetic over measured rates; the answer comes with its reason.

For one row, in seconds, summed over this visit and the later ones that share its rows:

    without     uses x (FLOPs of the prefix / rate)
    with        FLOPs of filling / rate  +  bytes / write rate  +  uses x bytes / read rate

Filling a row that the visit before has stored costs the layers in between only. A row that is used once, of which
nothing is stored and which no later visit sees again, costs as much to fill as to run: the cache can only lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from blocktrain.cache.encoding import Kind
from blocktrain.errors import ConfigError
from blocktrain.units import format_bytes

CachePlace = Literal["device", "host", "file"]
PLACES: tuple[CachePlace, ...] = ("device", "host", "file")  # fastest first

# Room that is left alone: for the rest of the training step on a device, for everybody else on host and disk.
KEPT_FREE = {"device": 0.5, "host": 0.5, "file": 0.1}


@dataclass(frozen=True, kw_only=True)
class PrefixConfig:
    """The prefix cache of a run.

    store: "auto" decides at each visit; "off"; or "device", "host" (pinned on a GPU machine), "file" (in the run's
        folder).
    dtype: "compute" stores hidden states as they are; "bf16"; "int8" with a scale for each token (lossy).
    fill: "lazy" computes a row when it is first needed; "ahead" computes all before the visit, `fill_rows` at a time.
    fill_rows: rows of one pass that fills ahead.
    """

    store: Literal["auto", "off", "device", "host", "file"] = "auto"
    dtype: Kind = "compute"
    fill: Literal["lazy", "ahead"] = "lazy"
    fill_rows: int = 32

    def __post_init__(self) -> None:
        if self.fill_rows < 1:
            raise ConfigError(f"fill_rows must be at least 1, not {self.fill_rows}")


@dataclass(frozen=True, kw_only=True)
class VisitReuse:
    """What one visit asks of a row."""

    uses: float  # how often its steps ask for the row; below 1 where they do not reach all rows
    prefix_flops: int  # from the inputs to the boundary
    fill_flops: float  # from what is stored when the visit begins, averaged over the rows


@dataclass(frozen=True, kw_only=True)
class CacheFacts:
    """What the choice depends on, all counted or measured."""

    needs: Sequence[VisitReuse]  # this visit, and the later ones that see the same rows
    num_slots: int
    row_bytes: int  # at one boundary
    boundaries: int = 1  # kept at once, all written by one pass
    flops_per_second: float
    read_bytes_per_second: Mapping[CachePlace, float]
    write_bytes_per_second: Mapping[CachePlace, float]
    free_bytes: Mapping[CachePlace, float]


@dataclass(frozen=True, kw_only=True)
class CacheDecision:
    """Where the cache lies (None: nowhere) and why."""

    place: CachePlace | None
    reason: str


def choose(facts: CacheFacts, wanted: str = "auto") -> CacheDecision:
    """The first of device, host and file that fits and pays; one asked for by name is taken without asking that."""
    if wanted != "auto":
        return CacheDecision(place=_place(wanted), reason=f"store = '{wanted}' in the configuration")
    without = facts.num_slots * sum(need.uses * need.prefix_flops for need in facts.needs) / facts.flops_per_second
    if not facts.needs[0].prefix_flops:
        return CacheDecision(place=None, reason="cannot pay: the prefix costs no FLOPs")
    filling = facts.num_slots * sum(min(1.0, need.uses) * need.fill_flops for need in facts.needs)
    filling_seconds = filling / facts.flops_per_second
    if filling_seconds >= without:
        return CacheDecision(place=None, reason=_cannot_pay(facts))
    at_one = facts.num_slots * facts.row_bytes
    nbytes = at_one * facts.boundaries
    refused = []
    for place in PLACES:
        if place not in facts.free_bytes:
            continue
        room = max(0.0, facts.free_bytes[place] * (1 - KEPT_FREE[place]))
        if nbytes > room:
            refused.append(f"{place} has room for {format_bytes(room)} of {format_bytes(nbytes)}")
            continue
        if place not in facts.read_bytes_per_second:
            refused.append(f"{place} could not be written to")
            continue
        moved = sum(
            _written(need, facts) / facts.write_bytes_per_second[place] + need.uses / facts.read_bytes_per_second[place]
            for need in facts.needs
        )
        seconds = filling_seconds + at_one * moved
        if seconds < without:
            reason = f"{place}: {seconds:.3g} s of filling and reading instead of {without:.3g} s of prefix passes"
            return CacheDecision(place=place, reason=reason)
        refused.append(f"{place} would take {seconds:.3g} s instead of {without:.3g} s")
    return CacheDecision(place=None, reason="does not pay: " + "; ".join(refused))


def _written(need: VisitReuse, facts: CacheFacts) -> float:
    """How often a visit writes a row: at every boundary that is kept where it is computed, not at all where it is found
    as it is needed."""
    return min(1.0, need.uses) * facts.boundaries if need.fill_flops else 0.0


def _cannot_pay(facts: CacheFacts) -> str:
    need = facts.needs[0]
    used = "once" if need.uses == 1 else f"{need.uses:.2g} times"
    return (
        f"cannot pay: each row is used {used} in the visit and no later visit sees it again; repeat rows within a "
        "visit (schedule.visit = '2 epochs' of a [sampling] subset) or share a subset over a sweep (scope = 'sweep')"
    )


def _place(wanted: str) -> CachePlace | None:
    return next((place for place in PLACES if place == wanted), None)

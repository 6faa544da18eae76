"""Does a prefix cache pay, and in which store? Arithmetic over measured rates; the answer comes with its reason.

For one row, in seconds, summed over this visit and the later ones that share its rows:

    without     uses x (FLOPs of the prefix / rate)
    with        FLOPs of filling / rate  +  bytes / write rate  +  uses x bytes / read rate

Filling a row that the visit before has stored costs only the layers in between. A row costs as much to fill as to run
if it is used once, nothing of it is stored, and no later visit uses it: then the cache can only lose.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from blocktrain.cache.store import STORES
from blocktrain.runtime import available_memory_bytes
from blocktrain.units import format_bytes

CachePlace = Literal["device", "host", "file"]

# The share of the free room that is left alone, by medium: on a device for the rest of the training step, on the host
# and the disk for other programs.
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
    read_bytes_per_second: Mapping[CachePlace, float]
    write_bytes_per_second: Mapping[CachePlace, float]
    free_bytes: Mapping[CachePlace, float]


@dataclass(frozen=True, kw_only=True)
class CacheDecision:
    """Which of `STORES` the cache uses (None: there is no cache) and why."""

    place: str | None
    reason: str


def choose(facts: CacheFacts, wanted: str = "auto") -> CacheDecision:
    """The first of `STORES` that fits and pays. One that is `wanted` by name is taken whether it pays or not."""
    if wanted != "auto":
        place = wanted if wanted in STORES else None
        return CacheDecision(place=place, reason=f"store = '{wanted}' in the configuration")
    if not facts.visits[0].prefix_flops:
        return CacheDecision(place=None, reason="cannot pay: the prefix costs no FLOPs")
    without = facts.num_slots * sum(visit.uses * visit.prefix_flops for visit in facts.visits) / facts.flops_per_second
    fill_flops = facts.num_slots * sum(min(1.0, visit.uses) * visit.fill_flops for visit in facts.visits)
    fill_seconds = fill_flops / facts.flops_per_second
    if fill_seconds >= without:
        return CacheDecision(place=None, reason=_no_reuse(facts.visits[0]))
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
        seconds_per_byte = sum(_writes(visit, facts) / write_rate + visit.uses / read_rate for visit in facts.visits)
        seconds = fill_seconds + boundary_bytes * seconds_per_byte
        if seconds < without:
            reason = f"{place}: {seconds:.3g} s of filling and reading instead of {without:.3g} s of prefix passes"
            return CacheDecision(place=place, reason=reason)
        refused.append(f"{place} would take {seconds:.3g} s instead of {without:.3g} s")
    return CacheDecision(place=None, reason="does not pay: " + "; ".join(refused))


def _no_reuse(visit: VisitReuse) -> str:
    used = "once" if visit.uses == 1 else f"{visit.uses:.2g} times"
    return (
        f"cannot pay: each row is used {used} in the visit and no later visit sees it again; repeat rows within a "
        "visit (schedule.visit = '2 epochs' of a [sampling] subset) or share a subset over a sweep (scope = 'sweep')"
    )


def _writes(visit: VisitReuse, facts: CacheFacts) -> float:
    """How often a visit writes a row: once for each stored boundary if it computes the row, never if it finds the row
    at its boundary."""
    return min(1.0, visit.uses) * facts.boundaries if visit.fill_flops else 0.0


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """Bytes per second to and from each place, measured on this machine with `probe_bytes` of data."""

    read: Mapping[CachePlace, float]
    write: Mapping[CachePlace, float]


def measure_bandwidths(device: torch.device, folder: Path, *, probe_bytes: int = 16 * 2**20) -> Bandwidths:
    """Time copies to and from the device, within the host, and to a file in `folder`; takes about half a second.

    A file is written through to the disk and read from it, as far as the system lets one drop its cached pages: a
    cache that is larger than the memory left will be. Without rates of "file" where none can be written.
    """
    rows = torch.ones(64, probe_bytes // 64, dtype=torch.uint8)
    index = torch.from_numpy(np.random.default_rng(0).permutation(64))
    read: dict[CachePlace, float] = {"host": _rate(lambda: rows[index].to(device), probe_bytes)}
    write: dict[CachePlace, float] = {"host": _rate(rows.clone, probe_bytes)}
    if device.type != "cpu":
        there = rows.to(device)
        where = index.to(device)
        read["device"] = _rate(lambda: there[where].sum().item(), probe_bytes)
        write["device"] = _rate(lambda: there.copy_(rows).sum().item(), probe_bytes)
    with suppress(OSError), tempfile.TemporaryDirectory(dir=folder, prefix=".probe-") as place:
        path = Path(place) / "rows"
        write["file"] = _rate(lambda: _write_through(path, rows.numpy()), probe_bytes)
        read["file"] = _rate(lambda: _read_from_disk(path, rows.shape, index.numpy()).to(device), probe_bytes)
    return Bandwidths(read=read, write=write)


def _write_through(path: Path, rows: np.ndarray) -> None:
    with path.open("wb") as file:
        rows.tofile(file)
        os.fsync(file.fileno())


def _read_from_disk(path: Path, shape: tuple[int, ...], order: np.ndarray) -> torch.Tensor:
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return torch.from_numpy(np.take(np.memmap(file, np.uint8, "r", shape=shape), order, axis=0))


def free_bytes(device: torch.device, folder: Path) -> dict[CachePlace, float]:
    """What is free now: on the device (where there is one beside the host), in host memory, on the disk of `folder`."""
    free: dict[CachePlace, float] = {
        "host": float(available_memory_bytes()),
        "file": float(shutil.disk_usage(folder).free),
    }
    if device.type == "cuda":
        free["device"] = float(torch.cuda.mem_get_info(device)[0])
    return free


def _rate(action, nbytes: int) -> float:
    """The best of three: what the machine can do when it is not disturbed."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return nbytes / best

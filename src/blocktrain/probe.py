"""How fast this machine copies, reads, writes and multiplies, measured now: the one probe of the machine.

    blocktrain doctor       prints the copies, the file accesses and the matrix products
    blocktrain calibrate    stores them for the planner, with the rates of further kernels (plan/calibrate.py)
    the prefix cache        decides from the row accesses whether it pays, and where (cache/cost_model.py)

Everything is timed by `median_seconds` or `best_seconds`, which take turns between the actions that they compare: other
work on the machine then slows all of them down alike. All rates are in bytes or FLOPs per second.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from blocktrain.runtime import available_memory_bytes, synchronize

Medium = Literal["device", "host", "file"]  # where data can be stored
Action = Callable[[], object]
Name = TypeVar("Name", bound=str)
Result = TypeVar("Result")

COPY_BYTES = 64 * 2**20
ROW_BYTES = 16 * 2**20  # of all rows together
ROWS = 64
TOKENS = 1024  # rows of the matrix products


# -- timing -----------------------------------------------------------------------------------------------------------


def median_seconds(actions: Mapping[Name, Action], device: torch.device, *, tries: int = 7) -> dict[Name, float]:
    """The median time of each action, in seconds: what a run sees, other work on the machine included."""
    return {name: statistics.median(times) for name, times in _times(actions, device, tries).items()}


def best_seconds(actions: Mapping[Name, Action], device: torch.device, *, tries: int = 3) -> dict[Name, float]:
    """The shortest time of each action, in seconds: what the machine can do when nothing disturbs it."""
    return {name: min(times) for name, times in _times(actions, device, tries).items()}


def _times(actions: Mapping[Name, Action], device: torch.device, tries: int) -> dict[Name, list[float]]:
    """Each action runs once untimed, and then once in each of `tries` rounds. The device's queue is empty before and
    after each."""
    for action in actions.values():
        action()
    times: dict[Name, list[float]] = {name: [] for name in actions}
    for _ in range(tries):
        for name, action in actions.items():
            synchronize(device)
            start = time.perf_counter()
            action()
            synchronize(device)
            times[name].append(time.perf_counter() - start)
    return times


# -- copies and files -------------------------------------------------------------------------------------------------


def copy_rates(device: torch.device, *, copy_bytes: int = COPY_BYTES, tries: int = 5) -> dict[str, float]:
    """Bytes per second of one large copy: "host copy"; with a device of its own memory also "host to device" and
    "device to host", from and to page-locked memory, and "device copy". Medians."""
    block, target = torch.ones(copy_bytes, dtype=torch.uint8), torch.empty(copy_bytes, dtype=torch.uint8)
    actions: dict[str, Action] = {"host copy": lambda: target.copy_(block)}
    if device.type != "cpu":
        pinned = block.pin_memory()
        on_device, beside = block.to(device), torch.empty_like(block, device=device)
        actions |= {
            "host to device": lambda: on_device.copy_(pinned, non_blocking=True),
            "device to host": lambda: pinned.copy_(on_device, non_blocking=True),
            "device copy": lambda: beside.copy_(on_device),
        }
    return _rates(median_seconds(actions, device, tries=tries), copy_bytes)


def file_rates(folder: Path, *, copy_bytes: int = COPY_BYTES, tries: int = 3) -> dict[str, float]:
    """Bytes per second of "disk write", through to the disk, and of "disk read", from it as far as the system lets a
    file's cached pages be dropped. Medians. Empty where `folder` cannot be written to."""
    data = np.ones(copy_bytes, dtype=np.uint8)
    with suppress(OSError), _probe_file(folder) as path:
        actions: dict[str, Action] = {
            "disk write": lambda: _write_through(path, data),
            "disk read": lambda: _read(path, np.array, data.shape),
        }
        return _rates(median_seconds(actions, torch.device("cpu"), tries=tries), copy_bytes)
    return {}


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """Bytes per second of reading and writing stored rows, by where they are stored."""

    read: Mapping[Medium, float]
    write: Mapping[Medium, float]


def measure_bandwidths(device: torch.device, folder: Path, *, probe_bytes: int = ROW_BYTES) -> Bandwidths:
    """Time what a store of rows does: it writes them in order, and gathers them for the device in random order.

    The best of three tries; about half a second. There are rates of "device" only where the device has memory of its
    own, and of "file" only where `folder` can be written to. A file is written through to the disk and read from it,
    because a cache that is larger than the memory left will be, too.
    """
    rows = torch.ones(ROWS, probe_bytes // ROWS, dtype=torch.uint8)
    order = torch.from_numpy(np.random.default_rng(0).permutation(ROWS))
    read: dict[Medium, Action] = {"host": lambda: rows[order].to(device)}
    write: dict[Medium, Action] = {"host": rows.clone}
    if device.type != "cpu":
        stored, order_there = rows.to(device), order.to(device)
        read["device"] = lambda: stored[order_there]
        write["device"] = lambda: stored.copy_(rows)
    reading, writing = (_rates(best_seconds(actions, device), probe_bytes) for actions in (read, write))
    with suppress(OSError), _probe_file(folder) as path:
        values, indices = rows.numpy(), order.numpy()

        def gather(pages: np.ndarray) -> Tensor:
            return torch.from_numpy(np.take(pages, indices, axis=0)).to(device)

        in_file: dict[str, Action] = {
            "write": lambda: _write_through(path, values),
            "read": lambda: _read(path, gather, values.shape),
        }
        rates = _rates(best_seconds(in_file, device), probe_bytes)
        reading["file"], writing["file"] = rates["read"], rates["write"]
    return Bandwidths(read=reading, write=writing)


def _rates(seconds: Mapping[Name, float], nbytes: int) -> dict[Name, float]:
    return {name: nbytes / each for name, each in seconds.items()}


@contextmanager
def _probe_file(folder: Path) -> Iterator[Path]:
    """The name of a file in a new hidden folder below `folder`, which goes away afterwards; raises `OSError`."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".blocktrain-probe-") as place:
        yield Path(place) / "probe"


def _write_through(path: Path, data: np.ndarray) -> None:
    with path.open("wb") as file:
        data.tofile(file)
        os.fsync(file.fileno())


def _read(path: Path, use: Callable[[np.ndarray], Result], shape: tuple[int, ...]) -> Result:
    """What `use` makes of the file's bytes, none of which are in memory before."""
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return use(np.memmap(file, np.uint8, "r", shape=shape))


# -- memory -----------------------------------------------------------------------------------------------------------


def host_memory_bytes() -> int:
    """All memory of the host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_memory_bytes(device: torch.device) -> int | None:
    """All memory of the device; None where the device computes in the host's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def free_bytes(device: torch.device, folder: Path) -> dict[Medium, float]:
    """What is free now: in host memory, on the disk of `folder`, and on a device that has memory of its own."""
    free: dict[Medium, float] = {
        "host": float(available_memory_bytes()),
        "file": float(shutil.disk_usage(folder).free),
    }
    if device.type == "cuda":
        free["device"] = float(torch.cuda.mem_get_info(device)[0])
    return free


# -- matrix products --------------------------------------------------------------------------------------------------


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a matrix product of this dtype on this device, with finite numbers in its result."""
    try:
        a = torch.ones(16, 16, device=device).to(dtype)
        return bool(torch.isfinite((a @ a).float()).all())
    except (RuntimeError, TypeError):
        return False


def training_dtypes(device: torch.device) -> list[torch.dtype]:
    """The dtypes that a model can be trained in on `device`: fp32, and bf16 where it is supported."""
    has_bf16 = device.type == "cpu" or torch.cuda.is_bf16_supported()
    return [torch.float32, torch.bfloat16] if has_bf16 else [torch.float32]


def product_width(device: torch.device, at_least: int = 512) -> int:
    """Columns of matrices that are large enough to reach the device's rate, and small enough for a processor."""
    return at_least if device.type == "cpu" else max(at_least, 4096)


def matmul_rates(device: torch.device, *, width: int | None = None, tries: int = 7) -> dict[torch.dtype, float]:
    """FLOPs per second of the matrix products in an MLP's forward and backward passes, for each training dtype.

    Six products of (TOKENS, width) with (width, 4 width) matrices, as the layers of a model of that width have.
    width: None takes 512 on a processor and 4096 on an accelerator. Medians.
    """
    width = width or product_width(device)
    dtypes = {str(dtype): dtype for dtype in training_dtypes(device)}
    seconds = median_seconds({name: _mlp(device, dtype, width) for name, dtype in dtypes.items()}, device, tries=tries)
    return {dtype: 6 * 2 * TOKENS * 4 * width * width / seconds[name] for name, dtype in dtypes.items()}


def _mlp(device: torch.device, dtype: torch.dtype, width: int) -> Action:
    up = torch.randn(4 * width, width, device=device, dtype=dtype, requires_grad=True)
    down = torch.randn(width, 4 * width, device=device, dtype=dtype, requires_grad=True)
    x = torch.randn(TOKENS, width, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(TOKENS, width, device=device, dtype=dtype)
    return lambda: torch.autograd.grad(F.linear(F.linear(x, up), down), (x, up, down), gradient)

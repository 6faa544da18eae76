"""Where stored rows lie: device memory, host memory (pinned where there is a device to copy to), or a file.

A store has room for a fixed number of rows ("slots") of fixed shape. It knows nothing of what they mean.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from blocktrain.cache.encoding import Fields
from blocktrain.errors import StorageError, storage_errors
from blocktrain.units import format_bytes


@dataclass(frozen=True)
class Field:
    """One array of a store: what each slot holds of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes a slot."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


RowLayout = Mapping[str, Field]


def layout_of(row: Fields) -> dict[str, Field]:
    """The layout that holds rows like the first one of `row`."""
    return {name: Field(tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in row.items()}


def slot_bytes(layout: RowLayout) -> int:
    """Bytes of one slot over all fields."""
    return sum(field.nbytes for field in layout.values())


class Store(Protocol):
    """Slots that are written and read by index."""

    nbytes: int
    folder: Path | None  # of a store that outlives its process, for its ledger

    def write(self, slots: np.ndarray, rows: Fields) -> None:
        """Put `rows` (first dimension as long as `slots`, int64) into their slots."""
        ...

    def read(self, slots: np.ndarray) -> Fields:
        """The rows in `slots`, on the host or the device: where the store lies."""
        ...

    def close(self, *, keep_files: bool = False) -> None:
        """Give the room back; `keep_files` that another process will open again."""
        ...


class MemoryStore:
    """Slots in memory of `device`; pinned host memory where `pin`, for copies that do not wait."""

    def __init__(self, num_slots: int, layout: RowLayout, *, device: torch.device, pin: bool = False):
        """Claim the room; raises `StorageError` when there is none."""
        self.nbytes = num_slots * slot_bytes(layout)
        self.folder: Path | None = None
        self._pin = pin
        try:
            self._arrays = {
                name: torch.empty((num_slots, *field.shape), dtype=field.dtype, device=device, pin_memory=pin)
                for name, field in layout.items()
            }
        except RuntimeError as error:  # a CPU's allocator has no class of its own for it
            raise StorageError(f"no room for {format_bytes(self.nbytes)} in the memory of '{device}'") from error

    def write(self, slots: np.ndarray, rows: Fields) -> None:
        """Copy `rows` into their slots."""
        for name, array in self._arrays.items():
            array[torch.from_numpy(slots).to(array.device)] = rows[name].detach().to(array.device)

    def read(self, slots: np.ndarray) -> Fields:
        """A copy of the rows; pinned if the store is."""
        found = {}
        for name, array in self._arrays.items():
            index = torch.from_numpy(slots).to(array.device)
            out = torch.empty(
                (len(slots), *array.shape[1:]), dtype=array.dtype, device=array.device, pin_memory=self._pin
            )
            found[name] = torch.index_select(array, 0, index, out=out)
        return found

    def close(self, *, keep_files: bool = False) -> None:
        """Free the memory."""
        self._arrays = {}


class FileStore:
    """Slots in one file a field. The whole room is claimed at once, so that a disk that is too small says so at the
    start; rows are written with `pwrite` (a full disk is then an error, where a mapped page would be a SIGBUS) and
    read through a map."""

    def __init__(self, folder: Path, num_slots: int, layout: RowLayout):
        """Open `folder`'s files, made or grown where need be; raises `StorageError` when there is no room."""
        self.nbytes = num_slots * slot_bytes(layout)
        self.folder: Path | None = folder
        self._folder = folder
        self._files: dict[str, int] = {}
        self._maps: dict[str, np.ndarray] = {}
        self._layout = dict(layout)
        try:
            with storage_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                for name, field in layout.items():
                    path = self._path(name)
                    self._files[name] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                    claim(self._files[name], num_slots * field.nbytes)
                    self._maps[name] = np.memmap(path, np.uint8, "r", shape=(num_slots, field.nbytes))
        except StorageError:
            self.close()  # a claim that failed may have taken all that was left
            raise

    def write(self, slots: np.ndarray, rows: Fields) -> None:
        """Write each row at its place; raises `StorageError` when the disk refuses."""
        with storage_errors(self._folder):
            for name, field in self._layout.items():
                data = as_bytes(rows[name])
                for slot, row in zip(slots.tolist(), data, strict=True):
                    if os.pwrite(self._files[name], row, slot * field.nbytes) != field.nbytes:
                        raise StorageError(f"a row of '{self._folder}' was written in part; free some space")

    def read(self, slots: np.ndarray) -> Fields:
        """The rows, read into host memory."""
        return {
            name: torch.from_numpy(np.take(self._maps[name], slots, axis=0)).view(field.dtype).view(-1, *field.shape)
            for name, field in self._layout.items()
        }

    def _path(self, field: str) -> Path:
        return self._folder / f"{field}.rows"

    def close(self, *, keep_files: bool = False) -> None:
        """Close the files, and delete them unless they are to stay."""
        self._maps = {}
        for name, handle in self._files.items():
            os.close(handle)
            if not keep_files:
                self._path(name).unlink(missing_ok=True)
        self._files = {}


def claim(handle: int, nbytes: int) -> None:
    """Make the file of `handle` at least `nbytes` long with its room on the disk reserved, where the system can."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, max(1, nbytes))
    elif os.fstat(handle).st_size < nbytes:
        os.truncate(handle, nbytes)


def as_bytes(rows: Tensor) -> np.ndarray:
    """Rows as bytes, uint8 (B, bytes of a row)."""
    return rows.detach().cpu().contiguous().reshape(len(rows), -1).view(torch.uint8).numpy()

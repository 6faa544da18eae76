"""Stores rows of tensors in device memory, in host memory (pinned where there is a device to copy to), or in files.

A store has room for a fixed number of rows ("slots") of fixed shape, and does not know what the rows mean. `STORES`
lists the kinds of stores by the name that `prefix.store` takes; a new kind is a class like `MemoryStore` and one entry
there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from blocktrain.cache.encoding import Fields
from blocktrain.errors import OutOfMemoryError, StorageError, storage_errors
from blocktrain.probe import Medium
from blocktrain.runtime import page_locked
from blocktrain.units import format_bytes


@dataclass(frozen=True)
class Field:
    """One array of a store: the shape and dtype of what each slot has in it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


RowLayout = Mapping[str, Field]


def layout_of(rows: Fields) -> dict[str, Field]:
    """The layout of a slot for rows like these; their first dimension counts them."""
    return {name: Field(tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in rows.items()}


def slot_bytes(layout: RowLayout) -> int:
    """Bytes of one slot over all fields."""
    return sum(field.nbytes for field in layout.values())


class Store(Protocol):
    """Slots that are written and read by index."""

    nbytes: int
    folder: Path | None  # where the ledger of a store that outlives its process is written; None for other stores

    def write(self, slots: np.ndarray, rows: Fields) -> None:
        """Write `rows` (first dimension as long as `slots`, int64) into their slots."""
        ...

    def read(self, slots: np.ndarray) -> Fields:
        """The rows in `slots`, on the host or on the device, depending on the store."""
        ...

    def close(self, *, keep_files: bool = False) -> None:
        """Free the space. `keep_files` leaves files in place for another process to open."""
        ...


class MemoryStore:
    """Slots in the memory of `device`. pin: pinned host memory, from which copies to a device are asynchronous."""

    def __init__(self, num_slots: int, layout: RowLayout, *, device: torch.device, pin: bool = False):
        """Allocate the slots; raises `StorageError` when there is no room."""
        self.nbytes = num_slots * slot_bytes(layout)
        self.folder: Path | None = None
        self._pin = pin
        try:
            self._arrays = {
                name: page_locked((num_slots, *field.shape), field.dtype)
                if pin
                else torch.empty((num_slots, *field.shape), dtype=field.dtype, device=device)
                for name, field in layout.items()
            }
        # The CPU allocator has no exception class of its own.
        except (RuntimeError, OSError, OutOfMemoryError) as error:
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
    """Slots in one file per field. All the room is reserved at once, so that a disk that is too small is an error at
    the start. Rows are written with `pwrite`, so that a full disk is an error and not the SIGBUS of a mapped page, and
    are read through a memory map."""

    def __init__(self, folder: Path, num_slots: int, layout: RowLayout):
        """Open the files in `folder`, creating or growing them; raises `StorageError` when there is no room."""
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
                    reserve(self._files[name], num_slots * field.nbytes)
                    self._maps[name] = np.memmap(path, np.uint8, "r", shape=(num_slots, field.nbytes))
        except StorageError:
            self.close()  # a reservation that failed may have taken all the room that was left
            raise

    def write(self, slots: np.ndarray, rows: Fields) -> None:
        """Write each row at its offset; raises `StorageError` when the disk refuses."""
        with storage_errors(self._folder):
            for name, field in self._layout.items():
                data = as_bytes(rows[name])
                for slot, row in zip(slots.tolist(), data, strict=True):
                    if os.pwrite(self._files[name], row, slot * field.nbytes) != field.nbytes:
                        raise StorageError(f"a row of '{self._folder}' was written only in part; free some space")

    def read(self, slots: np.ndarray) -> Fields:
        """The rows, read into host memory."""
        return {
            name: torch.from_numpy(np.take(self._maps[name], slots, axis=0)).view(field.dtype).view(-1, *field.shape)
            for name, field in self._layout.items()
        }

    def _path(self, field: str) -> Path:
        return self._folder / f"{field}.rows"

    def close(self, *, keep_files: bool = False) -> None:
        """Close the files, and delete them unless `keep_files`."""
        self._maps = {}
        for name, handle in self._files.items():
            os.close(handle)
            if not keep_files:
                self._path(name).unlink(missing_ok=True)
        self._files = {}


def reserve(handle: int, nbytes: int) -> None:
    """Make the file of `handle` at least `nbytes` long, and reserve its room on the disk where the system can."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, max(1, nbytes))
    elif os.fstat(handle).st_size < nbytes:
        os.truncate(handle, nbytes)


def as_bytes(rows: Tensor) -> np.ndarray:
    """Rows as bytes, uint8 (B, bytes of a row)."""
    return rows.detach().cpu().contiguous().reshape(len(rows), -1).view(torch.uint8).numpy()


@dataclass(frozen=True, kw_only=True)
class StoreKind:
    """One kind of store, as `STORES` lists it.

    make: makes a store from a folder of its own (which need not exist, and which a store in memory does not create),
        the number of slots, the layout of a slot, and the model's device.
    medium: what the rows take room in, and at whose measured rates they are read and written: the memory of the
        "device", the memory of the "host" (shared by the ranks on it), or a "file" on the run's disk (shared by all
        ranks).
    """

    make: Callable[[Path, int, RowLayout, torch.device], Store]
    medium: Medium


STORES: dict[str, StoreKind] = {  # the fastest first: `prefix.store = "auto"` takes the first that fits and pays
    "device": StoreKind(
        make=lambda _folder, slots, layout, device: MemoryStore(slots, layout, device=device), medium="device"
    ),
    "host": StoreKind(
        make=lambda _folder, slots, layout, device: MemoryStore(
            slots, layout, device=torch.device("cpu"), pin=device.type == "cuda"
        ),
        medium="host",
    ),
    "file": StoreKind(make=lambda folder, slots, layout, _device: FileStore(folder, slots, layout), medium="file"),
}

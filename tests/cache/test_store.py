"""Every store reads what was written, bit for bit; a lack of room is an error that leaves no files behind."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.cache import store as stores
from blocktrain.cache.encoding import Encoding, EncodingKind, Fields
from blocktrain.cache.store import Field, FileStore, MemoryStore, RowLayout, Store, as_bytes, layout_of, slot_bytes
from blocktrain.errors import StorageError

CPU = torch.device("cpu")
Make = Callable[[Path, int, RowLayout], Store]
STORES: dict[str, Make] = {
    "memory": lambda _folder, slots, layout: MemoryStore(slots, layout, device=CPU),
    "file": FileStore,
}
KINDS: list[tuple[EncodingKind, torch.dtype]] = [
    ("compute", torch.float32),
    ("compute", torch.bfloat16),
    ("bf16", torch.float32),
    ("int8", torch.float32),
]


def rows(kind: EncodingKind, dtype: torch.dtype, count: int, *shape: int) -> Fields:
    return Encoding(kind).encode(torch.randn(count, *(shape or (3, 8))).to(dtype))


def equal(one: Fields, other: Fields) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_rows_come_back_bit_for_bit_in_any_order(tmp_path: Path, make: Make, kind: EncodingKind, dtype: torch.dtype):
    given = rows(kind, dtype, 7)
    store = make(tmp_path / "here", 10, layout_of(given))
    slots = np.array([9, 0, 4, 2, 7, 1, 3])
    store.write(slots[:4], {name: field[:4] for name, field in given.items()})
    store.write(slots[4:], {name: field[4:] for name, field in given.items()})
    assert equal(store.read(slots), given)
    backwards = store.read(slots[::-1].copy())
    assert equal(backwards, {name: field.flip(0) for name, field in given.items()})
    twice = store.read(np.array([4, 4]))
    assert equal(twice, {name: field[[2, 2]] for name, field in given.items()})

    again = rows(kind, dtype, 1)
    store.write(np.array([0]), again)
    assert equal(store.read(np.array([0])), again)
    assert equal(store.read(slots[2:]), {name: field[2:] for name, field in given.items()})
    store.close()


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_what_was_read_is_a_copy(tmp_path: Path, make: Make):
    given = rows("compute", torch.float32, 2)
    store = make(tmp_path / "here", 2, layout_of(given))
    store.write(np.arange(2), given)
    store.read(np.arange(2))["data"].zero_()
    assert equal(store.read(np.arange(2)), given)
    store.close()


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
@pytest.mark.parametrize("shape", [(16, 8, 8), (64,), (1,)])
def test_rows_of_any_shape(tmp_path: Path, make: Make, shape: tuple[int, ...]):
    given = {"data": torch.randn(3, 5, *shape).transpose(0, 1)}  # not contiguous
    store = make(tmp_path / "here", 5, layout_of(given))
    store.write(np.arange(5), given)
    assert equal(store.read(np.arange(5)), given)
    store.close()


def test_bytes_are_counted():
    layout = layout_of(rows("int8", torch.float32, 2, 16, 64))
    assert layout == {"data": Field((16, 64), torch.int8), "scale": Field((16, 1), torch.float32)}
    assert slot_bytes(layout) == 16 * 64 + 16 * 4
    assert MemoryStore(10, layout, device=CPU).nbytes == 10 * (16 * 64 + 16 * 4)


def test_as_bytes_of_a_dtype_that_numpy_does_not_have():
    values = torch.tensor([[1.0], [-2.0]], dtype=torch.bfloat16)
    assert as_bytes(values).tolist() == [[0x80, 0x3F], [0x00, 0xC0]]


def test_a_file_store_reserves_its_room_at_once_and_deletes_its_files_when_closed(tmp_path: Path):
    layout = layout_of(rows("int8", torch.float32, 1))
    store = FileStore(tmp_path / "here", 1000, layout)
    sizes = {path.name: path.stat() for path in (tmp_path / "here").iterdir()}
    assert {name: stat.st_size for name, stat in sizes.items()} == {"data.rows": 24000, "scale.rows": 12000}
    assert all(stat.st_blocks * 512 >= stat.st_size for stat in sizes.values())
    assert store.nbytes == 36000
    assert store.folder == tmp_path / "here"
    handles = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else None
    store.close()
    assert list((tmp_path / "here").iterdir()) == []
    if handles is not None:
        assert len(os.listdir("/proc/self/fd")) <= handles - 2  # and those of the maps


def test_a_file_store_that_is_opened_again_has_its_rows(tmp_path: Path):
    given = rows("compute", torch.float32, 4)
    FileStore(tmp_path, 4, layout_of(given)).write(np.arange(4), given)
    assert equal(FileStore(tmp_path, 4, layout_of(given)).read(np.arange(4)), given)


SMALL_DISK = """
import resource, sys
from pathlib import Path
import torch
from blocktrain.errors import StorageError
from blocktrain.cache.store import Field, FileStore
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
layout = {"scale": Field((10,), torch.float32), "data": Field((100,), torch.float32)}
try:
    FileStore(Path(sys.argv[1]), 1000, layout)  # 40 kB, then 400 kB
except StorageError as error:
    print(error)
"""


def test_a_disk_that_is_too_small_is_an_error_at_once_and_no_room_stays_reserved(tmp_path: Path):
    """In a process of its own: the first file fits, the second does not. The first file once stayed on the disk, so
    that the next checkpoint would have found it full."""
    command = [sys.executable, "-c", SMALL_DISK, str(tmp_path / "here")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"no room left while writing '{tmp_path / 'here'}'")
    assert list((tmp_path / "here").iterdir()) == []


def test_a_disk_that_fills_up_later_is_an_error_not_a_signal(tmp_path: Path):
    given = rows("compute", torch.float32, 4, 100)
    store = FileStore(tmp_path / "here", 100, layout_of(given))
    store.write(np.arange(4), given)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_100, hard))  # in the middle of row 50
    try:
        with pytest.raises(StorageError, match="no room left while writing"):
            store.write(np.array([10, 90]), {"data": given["data"][:2]})
        with pytest.raises(StorageError, match="was written only in part"):
            store.write(np.array([50]), {"data": given["data"][:1]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert equal(store.read(np.arange(4)), given)
    store.close()


def test_a_system_that_cannot_reserve_room_gets_a_file_of_the_right_length(tmp_path: Path, monkeypatch):
    monkeypatch.delattr(stores.os, "posix_fallocate", raising=False)
    given = rows("compute", torch.float32, 4)
    store = FileStore(tmp_path, 4, layout_of(given))
    store.write(np.arange(4), given)
    again = FileStore(tmp_path, 4, layout_of(given))  # not cut down to nothing
    assert equal(again.read(np.arange(4)), given)


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write"):
        FileStore(tmp_path / "file" / "here", 4, layout_of(rows("compute", torch.float32, 1)))


def test_memory_that_is_too_small_is_a_storage_error():
    """PyTorch raises a plain RuntimeError, which would have ended the run instead of the cache."""
    with pytest.raises(StorageError, match=r"no room for 4096\.0 TiB in the memory of 'cpu'"):
        MemoryStore(2**40, {"data": Field((1024,), torch.float32)}, device=CPU)

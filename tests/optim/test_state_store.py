"""State comes back from the host or the disk unchanged, and its files exist completely or not at all."""

from __future__ import annotations

import pickle
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from blocktrain.errors import CheckpointError, ConfigError, StorageError
from blocktrain.optim.state_store import (
    STATE_STORES,
    BlockState,
    Drop,
    KeepOnDisk,
    KeepOnHost,
    StateStore,
    decode_state,
    encode_state,
    make_state_store,
)

# What optimizers keep: moments of any dtype and shape, step counts without dimension, plain numbers; names with
# anything in them.
STATE: BlockState = {
    "h.0.weight": {
        "exp_avg": torch.randn(4, 3),
        "exp_avg_sq": torch.rand(3, 4).T,
        "step": torch.tensor(7.0),
        "calls": 2**53 + 1,
        "ratio": 0.1 + 0.2,
        "limit": float("inf"),
        "ready": True,
    },
    "odd//name/é": {
        "low": torch.randn(5).bfloat16(),
        "bits": torch.arange(3, dtype=torch.int16),
        "empty": torch.ones(0),
    },
    "only.numbers": {"count": 0},
}


def assert_same(found: BlockState | None, expected: BlockState) -> None:
    assert found is not None
    assert found.keys() == expected.keys()
    for name, entries in expected.items():
        assert found[name].keys() == entries.keys()
        for key, value in entries.items():
            mine: Any = found[name][key]
            assert type(mine) is type(value)
            if torch.is_tensor(value):
                assert (mine.dtype, mine.shape) == (value.dtype, value.shape)
                assert torch.equal(mine, value)
            else:
                assert mine == value


@pytest.fixture(params=["host", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StateStore:
    return KeepOnHost() if request.param == "host" else KeepOnDisk(tmp_path / "not" / "yet" / "there")


def test_state_comes_back_as_it_was(store: StateStore):
    store.put(1, STATE)
    assert_same(store.get(1), STATE)
    assert store.get(0) is None


def test_a_later_state_replaces_the_earlier_one(store: StateStore):
    store.put(0, STATE)
    store.put(0, {"w": {"step": torch.tensor(1.0)}})
    assert_same(store.get(0), {"w": {"step": torch.tensor(1.0)}})


def test_a_cleared_store_is_empty(store: StateStore):
    store.clear()  # also before there is anything
    store.put(0, STATE)
    store.put(1, STATE)
    store.clear()
    assert [store.get(block) for block in (0, 1)] == [None, None]


def test_clearing_leaves_other_files_in_the_folder(tmp_path: Path):
    (tmp_path / "notes.txt").touch()
    store = KeepOnDisk(tmp_path)
    store.put(0, STATE)
    store.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_empty_state_is_stored_too(store: StateStore):
    """SGD without momentum keeps nothing."""
    store.put(0, {})
    assert store.get(0) == {}


def test_later_steps_do_not_change_a_stored_state(store: StateStore):
    moving = torch.zeros(3)
    store.put(0, {"w": {"exp_avg": moving}})
    moving.add_(1)
    assert_same(store.get(0), {"w": {"exp_avg": torch.zeros(3)}})


def test_stored_state_requires_no_gradient(store: StateStore):
    store.put(0, {"w": {"exp_avg": torch.zeros(3, requires_grad=True)}})
    assert not (store.get(0) or {})["w"]["exp_avg"].requires_grad


def test_drop_stores_nothing():
    store = Drop()
    store.put(0, STATE)
    assert store.get(0) is None


def test_a_missing_or_damaged_file_is_an_error_and_not_a_fresh_start(tmp_path: Path):
    store = KeepOnDisk(tmp_path)
    assert store.get(0) is None
    store.put(0, STATE)
    store.get(0)  # waits for the file
    (file,) = tmp_path.iterdir()
    for damage in (lambda: file.write_bytes(b"junk"), file.unlink):
        damage()
        with pytest.raises(CheckpointError, match="damaged or gone"):
            store.get(0)


def test_nothing_is_pickled(tmp_path: Path):
    store = KeepOnDisk(tmp_path)
    store.put(0, STATE)
    store.get(0)
    (file,) = tmp_path.iterdir()
    tensors = safetensors.torch.load_file(file)
    assert {name for name in tensors if name.startswith("h.0")} == {
        f"h.0.weight//{key}" for key in ("exp_avg", "exp_avg_sq", "step")
    }
    with pytest.raises(ValueError):  # JSONDecodeError: never tried as a pickle
        decode_state(pickle.dumps(STATE))
    with pytest.raises(TypeError, match="not JSON serializable"):
        encode_state({"w": {"anything": object()}})


def test_a_failed_write_leaves_the_earlier_state(tmp_path: Path):
    """The system refuses to let a file grow past 4 KiB, as a full disk would."""
    store = KeepOnDisk(tmp_path)
    store.put(0, STATE)
    assert_same(store.get(0), STATE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        store.put(0, {"w": {"exp_avg": torch.zeros(4096)}})
        with pytest.raises(StorageError, match=r"no room left while writing '.*block-0\.safetensors'"):
            store.get(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(store.get(0), STATE)


def test_a_half_written_file_is_never_read(tmp_path: Path):
    (tmp_path / "block-0.partial").write_bytes(encode_state(STATE)[:100])
    assert KeepOnDisk(tmp_path).get(0) is None
    store = KeepOnDisk(tmp_path)
    store.put(0, STATE)
    assert_same(store.get(0), STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["block-0.safetensors"]


def test_put_returns_before_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go = threading.Event()

    def slow(state: BlockState) -> bytes:
        assert go.wait(10)
        return encode_state(state)

    monkeypatch.setattr("blocktrain.optim.state_store.encode_state", slow)
    store = KeepOnDisk(tmp_path)
    store.put(0, STATE)
    assert store.holds(0)
    assert list(tmp_path.iterdir()) == []
    go.set()
    assert_same(store.get(0), STATE)


def test_a_prefetched_state_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, reads = KeepOnDisk(tmp_path), []
    monkeypatch.setattr(
        "blocktrain.optim.state_store.decode_state", lambda data: (reads.append(len(data)), decode_state(data))[1]
    )
    store.put(0, STATE)
    store.prefetch(0)
    store.prefetch(0)
    store.prefetch(1)  # no state is stored for it
    assert_same(store.get(0), STATE)
    assert len(reads) == 1
    assert_same(store.get(0), STATE)
    assert len(reads) == 2


def test_a_prefetched_state_is_not_used_when_there_is_a_newer_one(tmp_path: Path):
    store = KeepOnDisk(tmp_path)
    store.put(0, STATE)
    store.prefetch(0)
    store.put(0, {"w": {"step": 2}})
    assert_same(store.get(0), {"w": {"step": 2}})


@pytest.mark.parametrize("use", ["put", "get"])
def test_an_error_in_the_background_is_raised_at_the_next_use(tmp_path: Path, use: str):
    blocked = tmp_path / "a file, not a folder"
    blocked.touch()
    store = KeepOnDisk(blocked)
    store.put(0, STATE)
    with pytest.raises(StorageError, match="cannot write"):
        store.put(1, STATE) if use == "put" else store.get(0)


def test_clearing_waits_and_forgets_errors(tmp_path: Path):
    store = KeepOnDisk(tmp_path)
    store.put(0, STATE)
    store.clear()
    assert list(tmp_path.iterdir()) == []
    assert store.get(0) is None


def test_every_process_reads_the_entries_in_the_same_order() -> None:
    """safetensors hands tensors out in an order of its own, which ranks that gather them one by one must not see."""
    state: BlockState = {
        f"layer.{number}.weight": {**{key: torch.ones(2) for key in ("step", "exp_avg", "exp_avg_sq")}, "count": 3}
        for number in (3, 1, 2, 0)
    }
    read = decode_state(encode_state(state))
    assert list(read) == [f"layer.{number}.weight" for number in range(4)]
    assert all(list(found) == ["count", "exp_avg", "exp_avg_sq", "step"] for found in read.values())


def test_a_store_of_ones_own_is_registered_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class KeepTwice(KeepOnDisk):
        """Any class with a store's methods."""

    monkeypatch.setitem(STATE_STORES, "twice", KeepTwice)
    store = make_state_store("twice", tmp_path)
    assert isinstance(store, KeepTwice)
    store.put(0, STATE)
    assert_same(store.get(0), STATE)
    with pytest.raises(ConfigError, match=r"optimizer\.state 'twise' is unknown; did you mean 'twice'"):
        make_state_store("twise", tmp_path)


def test_every_registered_store_is_a_value_of_the_configuration(tiny) -> None:
    assert [tiny(f"optimizer.state={name}").optimizer.state for name in STATE_STORES] == ["drop", "host", "disk"]

"""Cache folders are complete or absent, built by one process at a time, and rebuilt after a change."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from blocktrain.data.cache_folder import cache_home, cached_folder
from blocktrain.errors import DataError, StorageError


def _write(folder):
    (folder / "data").write_text("whole")


def _never(folder):
    raise AssertionError(f"{folder} was built again")


def _write_second(folder):
    (folder / "data").write_text("second")


def _write_large(folder):
    (folder / "data").write_bytes(bytes(10_000))


def _folders(home):
    return [path.name for place in home.iterdir() for path in place.iterdir() if path.is_dir()]


def test_built_once_then_found(tmp_path):
    folder = cached_folder(tmp_path, "text", source="s", key={"a": 1}, state=[1], write=_write)
    assert cached_folder(tmp_path, "text", source="s", key={"a": 1}, state=[1], write=_never) == folder
    assert (folder / "data").read_text() == "whole"
    assert cached_folder(tmp_path, "text", source="s", key={"a": 2}, state=[1], write=_write) != folder


def test_another_state_replaces_the_folder_and_leaves_open_files_readable(tmp_path):
    old = cached_folder(tmp_path, "text", source="s", key="k", state=1, write=_write)
    with (old / "data").open() as still_open:
        new = cached_folder(tmp_path, "text", source="s", key="k", state=2, write=_write)
        assert _folders(tmp_path) == [new.name]
        assert still_open.read() == "whole"


def test_a_copy_of_the_data_at_another_place_finds_the_folder(tmp_path):
    folder = cached_folder(tmp_path, "text", source="here", key="k", state=1, write=_write)
    assert cached_folder(tmp_path, "text", source="there", key="k", state=1, write=_never) == folder


def test_a_change_at_one_place_leaves_what_was_built_from_another(tmp_path):
    here = cached_folder(tmp_path, "text", source="here", key="k", state=1, write=_write)
    cached_folder(tmp_path, "text", source="there", key="k", state=2, write=_write)
    changed = cached_folder(tmp_path, "text", source="there", key="k", state=3, write=_write)
    assert sorted(_folders(tmp_path)) == sorted([here.name, changed.name])


def test_a_copy_that_was_built_in_the_meantime_is_taken(tmp_path):
    def write(folder):
        cached_folder(tmp_path, "text", source="there", key="k", state=1, write=_write_second)
        _write(folder)

    folder = cached_folder(tmp_path, "text", source="here", key="k", state=1, write=write)
    assert (folder / "data").read_text() == "second"
    assert _folders(tmp_path) == [folder.name]


def test_an_error_leaves_nothing(tmp_path):
    def fail(folder):
        _write(folder)
        raise DataError("line 7 is wrong")

    with pytest.raises(DataError, match="line 7"):
        cached_folder(tmp_path, "text", source="s", key="k", state=1, write=fail)
    assert _folders(tmp_path) == []


def _build_and_die(home):
    def write(folder):
        _write(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    cached_folder(home, "text", source="s", key="k", state=1, write=write)


def test_a_process_killed_while_it_builds(tmp_path):
    """SIGKILL runs no cleanup: the incomplete folder stays on disk, is never used, and the next build removes it."""
    process = multiprocessing.get_context("fork").Process(target=_build_and_die, args=(tmp_path,))
    process.start()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    (left,) = _folders(tmp_path)
    assert left.endswith(".part")
    folder = cached_folder(tmp_path, "text", source="s", key="k", state=1, write=_write_second)
    assert _folders(tmp_path) == [folder.name]
    assert (folder / "data").read_text() == "second"


def _build_and_count(home, barrier, log):
    def write(folder):
        with log.open("a") as file:
            file.write("built\n")
        _write(folder)

    barrier.wait(20)
    folder = cached_folder(home, "text", source="s", key="k", state=1, write=write)
    assert (folder / "data").read_text() == "whole"


def test_one_of_several_racing_processes_builds(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, log = context.Barrier(4), tmp_path / "log"
    workers = [context.Process(target=_build_and_count, args=(tmp_path / "home", barrier, log)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    assert log.read_text() == "built\n"


def test_no_room_is_a_storage_error(tmp_path, no_file_larger_than):
    with no_file_larger_than(4096), pytest.raises(StorageError, match="no room left while writing"):
        cached_folder(tmp_path, "text", source="s", key="k", state=1, write=_write_large)
    assert _folders(tmp_path) == []


def test_a_home_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot write '.*file/text-"):
        cached_folder(tmp_path / "file", "text", source="s", key="k", state=1, write=_write)


def test_the_configured_home_and_the_default_one(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_home(None) == tmp_path / "blocktrain"
    assert cache_home("~/mine") == Path.home() / "mine"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert cache_home(None) == tmp_path / "me" / ".cache" / "blocktrain"

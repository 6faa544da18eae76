"""`report --out /dev/null` as root used to replace the device by a file; links and pipes alike."""

from __future__ import annotations

import errno
import os
import pty
import stat
from pathlib import Path

import pytest

from blocktrain.errors import StorageError
from blocktrain.outputs import write_output


def test_a_file_is_written_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "page.html"
    write_output(path, "first ü")
    write_output(path, "second")
    assert path.read_text() == "second"
    assert os.listdir(path.parent) == ["page.html"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "page.html"
    link.symlink_to(tmp_path / "elsewhere" / "target.html")  # not there yet
    write_output(link, "first")
    write_output(link, "second")
    assert link.is_symlink()
    assert (tmp_path / "elsewhere" / "target.html").read_text() == "second"


def test_a_terminal_is_written_through() -> None:
    """A terminal of this test's own: no test touches the devices of the machine."""
    reader, writer = pty.openpty()
    path = Path(os.ttyname(writer))
    before = path.stat()
    write_output(path, "text\n")
    assert os.read(reader, 100) == b"text\r\n"
    after = path.stat()
    assert (stat.S_ISCHR(after.st_mode), after.st_rdev) == (True, before.st_rdev)
    os.close(reader)
    os.close(writer)


def test_a_pipe_is_refused_and_stays(tmp_path: Path) -> None:
    """Opening one would wait for a reader for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="pipe': it is a pipe; name another file"):
        write_output(tmp_path / "pipe", "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_link_to_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(StorageError, match="it is a pipe"):
        write_output(tmp_path / "link", "text")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="it is a folder; name another file"):
        write_output(tmp_path, "text")


def test_what_cannot_be_written_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(StorageError, match=r"cannot write '.*file/page\.html'"):
        write_output(tmp_path / "file" / "page.html", "text")
    with pytest.raises(StorageError, match="cannot write"):
        write_output(tmp_path / ("x" * 300), "text")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StorageError, match=r"cannot write '.*loop'"):
        write_output(tmp_path / "loop", "text")
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_lone_surrogate_is_written_as_an_escape(tmp_path: Path) -> None:
    write_output(tmp_path / "page.html", "a \ud800 b")
    assert (tmp_path / "page.html").read_text() == "a \\ud800 b"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_injected_failure_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """`run.json` and reports are written by this function: a full disk or a failed rename must not cost the old one."""
    path = tmp_path / "run.json"
    write_output(path, "first")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match=os.strerror(number)):
        write_output(path, "second")
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["run.json"]

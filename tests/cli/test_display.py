"""Training used to die with its display: `train ... | head -1` ended with exit code 1 and no checkpoint."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blocktrain.cli.display import LastingStream, lasting_display
from blocktrain.cli.main import main


class Full(io.StringIO):
    """A stream on a full disk: nothing can be written after the first `left` characters."""

    def __init__(self, left: int):
        super().__init__()
        self.left = left

    def write(self, text: str) -> int:
        self.left -= len(text)
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_what_cannot_be_written_is_dropped() -> None:
    full = Full(left=10)
    stream = LastingStream(full)
    print("first", file=stream)
    print("second line", file=stream, flush=True)
    print("third", file=stream)
    assert full.getvalue() == "first\n"
    assert stream.lost is not None
    assert stream.lost.errno == errno.ENOSPC


def test_standard_streams_are_restored(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with lasting_display():
        print("shown")
        assert isinstance(sys.stdout, LastingStream)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "shown\n"


def test_a_run_goes_on_when_its_reader_has_gone(config_file: Path, tmp_path: Path) -> None:
    """As in `blocktrain train ... | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)  # before the first line
    done = subprocess.run(
        [sys.executable, "-m", "blocktrain", "train", str(config_file), "--out", str(tmp_path / "run")],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    records = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert records[-1]["kind"] == "end"
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_result_that_nobody_can_read_is_an_error(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON is what was asked for; the run itself is complete."""
    monkeypatch.setattr(sys, "stdout", Full(left=0))
    assert main(["train", str(config_file), "--out", str(tmp_path / "run"), "--json"]) == 1
    assert "the result could not be written: No space left on device" in capsys.readouterr().err
    assert '"kind":"end"' in (tmp_path / "run" / "events.jsonl").read_text()


def test_an_encoding_without_our_characters(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under PYTHONIOENCODING=ascii a table, a path or a name with other letters used to be a traceback."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert main(["train", str(config_file), "--out", str(tmp_path / "rün"), "--set", "name=ü"]) == 0
    assert b"\\xfc" in written.getvalue()

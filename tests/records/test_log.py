"""The log survives being killed, cut off at a checkpoint, and numbers that JSON does not have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blocktrain.errors import DataError, StorageError
from blocktrain.records.log import EventLog, json_line, read_events

FIRST = {"kind": "step", "step": 1, "loss": 2.5}
SECOND = {"kind": "step", "step": 2, "loss": 2.25}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "events.jsonl"


def log_of(path: Path, *events: dict) -> EventLog:
    log = EventLog(path)
    for event in events:
        log.append(event)
    return log


def test_records_come_back_as_written(path: Path):
    log_of(path, FIRST, SECOND).close()
    assert read_events(path) == [FIRST, SECOND]
    assert path.read_bytes().count(b"\n") == 2


def test_a_record_is_readable_before_the_log_is_closed(path: Path):
    log = log_of(path, FIRST)
    assert read_events(path) == [FIRST]
    log.close()


def test_opening_again_appends(path: Path):
    log_of(path, FIRST).close()
    log = log_of(path, SECOND)
    assert log.length() == path.stat().st_size
    log.close()
    assert read_events(path) == [FIRST, SECOND]


def test_resuming_cuts_off_what_came_after_the_checkpoint(path: Path):
    log = log_of(path, FIRST)
    log.sync()
    length = log.length()
    log.append({"kind": "step", "step": 2, "loss": 99.0})
    log.close()
    resumed = EventLog(path, length=length)
    assert resumed.length() == length
    resumed.append(SECOND)
    resumed.close()
    assert read_events(path) == [FIRST, SECOND]


def test_a_log_shorter_than_its_checkpoint_says_is_refused_and_left_alone(path: Path):
    log_of(path, FIRST).close()
    content = path.read_bytes()
    with pytest.raises(DataError, match=rf"has {len(content)} bytes, but it had 1000 when the checkpoint was written"):
        EventLog(path, length=1000)
    assert path.read_bytes() == content


def test_numbers_outside_json_become_text(path: Path):
    event = {"loss": float("nan"), "nested": {"norms": [float("inf"), -float("inf"), 1.5]}, "pair": (1, 2.0)}
    assert json.loads(json_line(event)) == {"loss": "nan", "nested": {"norms": ["inf", "-inf", 1.5]}, "pair": [1, 2.0]}


def test_a_torn_last_line_is_left_out(path: Path):
    log_of(path, FIRST, SECOND).close()
    whole = path.read_bytes()
    for cut in range(len(json_line(FIRST)) + 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert read_events(path) == [FIRST]


def test_a_damaged_line_inside_is_named(path: Path):
    log_of(path, FIRST).close()
    path.write_bytes(path.read_bytes() + b"{broken\n" + json_line(SECOND) + b"\n")
    with pytest.raises(DataError, match=r"events\.jsonl' line 2 is not JSON"):
        read_events(path)


def test_a_missing_log_asks_for_the_folder_of_a_run(path: Path):
    with pytest.raises(DataError, match=r"does not exist; is '.*run' the folder of a run\?"):
        read_events(path)


def test_a_log_that_cannot_be_opened(tmp_path: Path):
    (tmp_path / "run").touch()
    with pytest.raises(StorageError, match=r"cannot write '.*events\.jsonl'"):
        EventLog(tmp_path / "run" / "events.jsonl")


def test_appending_to_a_closed_log_is_an_error(path: Path):
    log = log_of(path, FIRST)
    log.close()
    with pytest.raises(ValueError, match="closed file"):
        log.append(SECOND)

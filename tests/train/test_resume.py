"""An interrupted run ends as an uninterrupted one: same weights, optimizer state, data order and log, bit for bit."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import blocktrain as bt
from blocktrain.errors import Interrupted, StorageError
from blocktrain.records.log import read_events
from blocktrain.records.run_records import Record, Step
from blocktrain.train.checkpoint import checkpoints

VARIANTS = {
    "adamw-host": [],
    "adamw-drop": ["optimizer.state=drop"],
    "sgd-disk": ["optimizer.name=SGD", "optimizer.options.momentum=0.9", "optimizer.state=disk"],
    "muon-host": ["optimizer.name=Muon"],
    "bf16-exact": ["precision=bf16-exact"],
    "masters rebuilt": ["precision=bf16"],
    "int8 from the host, 8-bit moments": [
        "precision=int8",
        "memory.frozen=host",
        "optimizer.moments=8bit",
        "optimizer.state=disk",
    ],
    "frozen layers in int8": ["memory.frozen_compute=int8", "precision=int8"],
    "suffix visits": ["schedule.span=suffix", "precision=bf16-exact", "optimizer.state=disk"],
    "rows and parts of layers": ["blocks.largest=2000", "schedule.visit=2 steps", "schedule.sweeps=1"],
    "plateau": ["schedule.plateau.patience=1 steps", "schedule.plateau.threshold=0.5", "schedule.sweeps=2"],
    "early stopping": ["optimizer.lr=0.3", "evaluation.every=1 steps", "stop.patience=6", "schedule.visit=9 steps"],
    "micro-batches, shuffled": ["batch.micro_rows=2", "schedule.order=shuffled", "blocks.frozen_dropout=true"],
}


class Crash(BaseException):
    """As sudden as the power going: no handler runs, no checkpoint is written."""


def crash_at(count: int):
    """A listener that crashes at the `count`-th record."""
    seen = 0

    def listen(record: Record) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            raise Crash

    return listen


QUICK = {"adamw-host", "bf16-exact"}


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(v, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, v in VARIANTS.items()],
)
def test_a_crash_at_any_event_changes_nothing(tiny, outcome, tmp_path: Path, overrides: list[str]) -> None:
    config = tiny(*overrides)
    bt.run(config, tmp_path / "whole")
    expected = outcome(tmp_path / "whole")
    total = len(expected[0])
    assert total > 20
    for count in (2, 9, 15, total - 2) if not overrides else (13, total - 2):
        folder = tmp_path / f"crash-{count}"
        with pytest.raises(Crash):
            bt.run(config, folder, listeners=[crash_at(count)])
        with pytest.raises(Crash):  # and once more, a few events later
            bt.resume(folder, listeners=[crash_at(5)])
        bt.resume(folder)
        assert outcome(folder) == expected


def test_resuming_a_finished_run_changes_nothing(tiny, outcome, tmp_path: Path) -> None:
    bt.run(tiny(), tmp_path / "run")
    expected = outcome(tmp_path / "run")
    bt.resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == expected


def test_a_moved_run_that_was_killed_at_once_still_says_where_it_runs(tiny, tmp_path: Path) -> None:
    """The opening of the moved session lies behind its first checkpoint, where the log is cut."""
    with pytest.raises(Crash):
        bt.run(tiny(), tmp_path, listeners=[crash_at(9)])
    with pytest.raises(Crash):
        bt.resume(tmp_path, ["precision=bf16-exact"], listeners=[crash_at(5)])
    bt.resume(tmp_path)
    opened = [event["precision"] for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "run"]
    assert opened == ["fp32", "bf16-exact"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_writes_a_checkpoint_and_says_how_to_go_on(
    tiny, outcome, tmp_path: Path, number: int, code: int
) -> None:
    bt.run(tiny(), tmp_path / "whole")

    def interrupt(record: Record) -> None:
        if isinstance(record, Step) and record.step == 7:
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match=f"stopped at step 7; go on with: blocktrain resume {tmp_path}/run") as stop:
        bt.run(tiny(), tmp_path / "run", listeners=[interrupt])
    assert stop.value.exit_code == code
    assert checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-00000007"
    bt.resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_log_without_room_ends_the_run_with_one_message_and_nothing_is_lost(tiny, outcome, tmp_path: Path) -> None:
    """Closing the log wrote what had not fitted once more, and failed as a bare OSError."""
    bt.run(tiny(), tmp_path / "whole")
    log = tmp_path / "run" / "events.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk(record: Record) -> None:
        if isinstance(record, Step) and record.step == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 20, hard))  # in mid-record

    try:
        with pytest.raises(StorageError, match=r"no room left while writing '.*events\.jsonl' \(File too large\)"):
            bt.run(tiny(), tmp_path / "run", listeners=[fill_the_disk])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not log.read_bytes().endswith(b"\n")
    assert read_events(log)[-1]["step"] == 7
    bt.resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_sigkill_at_random_moments(tiny, outcome, tmp_path: Path) -> None:
    """A real process, really killed, three times; then left alone."""
    overrides = ["schedule.visit=40 steps", "checkpoint.every=7 steps", "evaluation.every=10 steps"]
    config = tiny(*overrides)
    bt.run(config, tmp_path / "whole")
    script = (
        "import sys, json, pathlib, blocktrain as bt\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "if (folder / 'run.json').exists(): bt.resume(folder)\n"
        "else: bt.run(bt.RunConfig.from_mapping(json.loads(sys.argv[2])), folder)\n"
    )
    folder = tmp_path / "killed"
    command = [sys.executable, "-W", "ignore", "-c", script, str(folder), json.dumps(config.to_mapping())]
    for steps in (3, 40, 85):  # killed soon after the log shows this step, at no particular moment of the next ones
        process = subprocess.Popen(command)
        deadline = time.monotonic() + 120
        while f'"step":{steps},' not in _text(folder / "events.jsonl") and time.monotonic() < deadline:
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
        time.sleep(0.013 * steps % 0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    subprocess.run(command, check=True)
    assert outcome(folder) == outcome(tmp_path / "whole")


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""

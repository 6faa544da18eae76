"""Trackers are sent what the run's log says, once, also when the run crashes and is resumed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import sqlite3
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

import blocktrain as bt
from blocktrain.cli.main import main
from blocktrain.errors import ConfigError
from blocktrain.integrations import trackers
from blocktrain.integrations.trackers import TrackedRun, Trackers
from blocktrain.records.log import read_events
from blocktrain.records.run_records import Evaluation, Record, RunHeader, Step, from_event
from blocktrain.train.config import RunConfig, TrackingConfig
from blocktrain.train.run_folder import RunFolder

from ..run_events import Crash, crash_at

Points = dict[str, list[tuple[int, float]]]


def points_of(records: Iterable[Record | None]) -> Points:
    """The figures that a log holds."""
    found: Points = {}
    for record in records:
        if isinstance(record, Step | Evaluation):
            for field, name in trackers.FIGURES[type(record)].items():
                if (value := getattr(record, field)) is not None:
                    found.setdefault(name, []).append((record.step, float(value)))
    return found


def session(config: RunConfig, folder: Path, steps: range) -> list[Record]:
    """The records that listeners get in a session of a run: `steps`, and an evaluation at every third of them."""
    if not (folder / "run.json").exists():
        RunFolder(folder).create(config, method="bcd", environment={}, command="")
    records: list[Record] = [
        RunHeader(method="bcd", name="tiny", model="GPT-2", parameters=1, tokens_per_step=1, rows_per_step=1)
    ]
    for step in steps:
        if step:
            records.append(
                Step(
                    step=step, tokens=step, seconds=step, visit=0, block=step // 4, loss=1 / step, lr=0.1, grad_norm=2.0
                )
            )
        if step % 3 == 0:
            losses = {"loss": 2 / (step + 1), "loss_per_byte": 1 / (step + 1)}
            records.append(Evaluation(step=step, tokens=step, seconds=step, visit=0, block=step // 4, **losses))
    with Trackers(config, folder) as listener:
        for record in records:
            listener(record)
    return records


def crashed_and_resumed(config: RunConfig, folder: Path) -> Points:
    """A crash after step 7, a checkpoint at step 4; returns what a tracker should show."""
    session(config, folder, range(8))
    session(config, folder, range(5, 13))
    untracked = replace(config, tracking=TrackingConfig())
    return points_of(session(untracked, folder.with_name("whole"), range(13)))


def test_tensorboard(tiny, tmp_path: Path) -> None:
    """A real run, which crashes one step after a checkpoint and is resumed."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing import event_accumulator  # pyright: ignore[reportMissingImports]

    config, folder = tiny("tracking.to=['tensorboard']"), tmp_path / "run"
    with Trackers(config, folder) as listener, pytest.raises(Crash):
        bt.run(config, folder, listeners=[listener, crash_at(7)])
    with Trackers(config, folder) as listener:
        bt.resume(folder, listeners=[listener])
    files = event_accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    shown = {tag: [(point.step, point.value) for point in files.Scalars(tag)] for tag in files.Tags()["scalars"]}
    expected = points_of(map(from_event, read_events(folder / "events.jsonl")))
    assert len(expected["train/loss"]) == 12
    assert shown.keys() == expected.keys()
    for name, points in expected.items():
        assert [step for step, _ in shown[name]] == [step for step, _ in points]
        assert [value for _, value in shown[name]] == pytest.approx([value for _, value in points], rel=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mlflow's own store
def test_mlflow(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    config = tiny("tracking.to=['mlflow']", "tracking.project=mine")
    expected = crashed_and_resumed(config, tmp_path / "run")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["optimizer.lr"] == "0.01"
    assert run.info.status == "FINISHED"
    for name, points in expected.items():
        history = client.get_metric_history(run.info.run_id, name)
        assert sorted((point.step, point.value) for point in history) == points


def test_wandb(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sent: list[tuple[str, dict[str, float], int]] = []
    log = wandb.Run.log

    def spy(self, figures, step):
        sent.append((self.id, figures, step))
        log(self, figures, step=step)

    monkeypatch.setattr(wandb.Run, "log", spy)
    config = tiny("tracking.to=['wandb']")
    expected = crashed_and_resumed(config, tmp_path / "run")
    assert len({key for key, _, _ in sent}) == 1  # both sessions are the same run
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 2
    for name, points in expected.items():
        assert dict(points) == {step: figures[name] for _, figures, step in sent if name in figures}


def test_trackio(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    config = tiny("tracking.to=['trackio']")
    expected = crashed_and_resumed(config, tmp_path / "run")
    (database,) = (tmp_path / "trackio").glob("*.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    for name, points in expected.items():
        shown = {(step, json.loads(metrics)[name]) for _, step, metrics in rows if name in json.loads(metrics)}
        assert sorted(shown) == points


def test_steps_between_two_of_log_every_are_not_sent(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = record(monkeypatch)
    config = tiny("tracking.to=['tensorboard']", "log_every=5")
    session(config, tmp_path / "run", range(13))
    assert [step for figures, step in sent if "train/loss" in figures] == [5, 10]
    assert [step for figures, step in sent if "validation/loss" in figures] == [0, 3, 6, 9, 12]


def test_off_by_default(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = record(monkeypatch)
    session(tiny(), tmp_path / "run", range(5))
    assert not sent
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_client_that_fails_does_not_end_the_run(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record(monkeypatch, fail_at=4)
    config = tiny("tracking.to=['tensorboard']")
    with caplog.at_level(logging.WARNING):
        session(config, tmp_path / "run", range(8))
    assert caplog.messages == ["training continues without tensorboard: OSError: the server is gone"]


def test_what_is_missing_is_said_before_anything_is_written(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "run.toml"
    path.write_text(
        "[model]\narchitecture = 'gpt2'\n[text]\nsource = 'stdlib'\n[schedule]\nvisit = '1 step'\nsweeps = 1\n"
    )
    arguments = ["train", str(path), "--out", str(tmp_path / "run"), "--set", "tracking.to=['wandb']"]
    assert main(arguments) == 2
    assert "whose client is not installed: pip install wandb" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"tracking\.to\[0\]: 'tensorbord' is not an allowed value; did you mean"):
        tiny("tracking.to=['tensorbord']")
    with pytest.raises(ConfigError, match="names a tracker twice"):
        tiny("tracking.to=['wandb', 'wandb']")


def test_a_client_that_cannot_be_opened_is_an_error(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, fail_at=-1)
    config = tiny("tracking.to=['tensorboard']")
    with pytest.raises(ConfigError, match=r"'tensorboard', which cannot be opened \(OSError: no such server\)"):
        session(config, tmp_path / "run", range(8))


def record(monkeypatch: pytest.MonkeyPatch, *, fail_at: int | None = None) -> list[tuple[dict[str, float], int]]:
    """Put a list in TensorBoard's place; it fails at a step, or (-1) when it is opened."""
    sent: list[tuple[dict[str, float], int]] = []

    class Fake:
        def __init__(self, run: TrackedRun):
            if fail_at == -1:
                raise OSError("no such server")

        def log(self, figures, step):
            if step == fail_at:
                raise OSError("the server is gone")
            sent.append((figures, step))

        def close(self) -> None:
            sent.append(({}, sys.maxsize))

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", Fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return sent

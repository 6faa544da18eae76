"""Starting and resuming a run: what the command line and other programs call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blocktrain.runtime import environment
from blocktrain.train.config import RunConfig
from blocktrain.train.folder import RunFolder
from blocktrain.train.interrupt import stop_requests
from blocktrain.train.job import build
from blocktrain.train.loop import Listener, Loop


def run(
    config: RunConfig, out: str | Path, *, method: str = "bcd", listeners: Sequence[Listener] = (), command: str = ""
) -> RunFolder:
    """Train as `config` says into the new folder `out`; raises `BlocktrainError` with a way out.

    method: what the report calls it.
    listeners: called with each record in order, steps that `log_every` leaves out of the log included.
    command: what the user typed, for `run.json`.

    Nothing is written before the whole configuration, data and model have been checked.
    """
    folder = RunFolder(Path(out))
    folder.require_new()
    job = build(config, folder.path)
    with folder.lock():
        folder.create(config, method=method, environment=environment(job.device), command=command)
        with stop_requests() as stop:
            Loop(job=job, folder=folder, method=method, listeners=listeners, stop=stop).run()
    return folder


def resume(out: str | Path, *, listeners: Sequence[Listener] = ()) -> RunFolder:
    """Go on with the run in `out` from its newest checkpoint, or from the start where it has none yet.

    `listeners` are those of `run`. Raises `CheckpointError` where the checkpoint is damaged or of another model.
    """
    folder = RunFolder(Path(out))
    method, config = folder.read()["method"], folder.config()
    with folder.lock():
        job = build(config, folder.path)
        with stop_requests() as stop:
            Loop(job=job, folder=folder, method=method, listeners=listeners, stop=stop).run()
    return folder

"""Starting and resuming a run: what the command line and other programs call, in each process of the run alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from blocktrain.parallel.ranks import Ranks, is_launched, open_ranks
from blocktrain.runtime import environment, pick_device
from blocktrain.train.blocks_train_module import BLOCKS
from blocktrain.train.config import RunConfig
from blocktrain.train.context import TrainingContext, build
from blocktrain.train.interrupt import stop_requests
from blocktrain.train.run_folder import RunFolder
from blocktrain.train.trainer import Listener, Trainer


def run(
    config: RunConfig, out: str | Path, *, method: str = "bcd", listeners: Sequence[Listener] = (), command: str = ""
) -> RunFolder:
    """Train as `config` says into the new folder `out`; raises `BlocktrainError` with a way out.

    method: what the report calls it.
    listeners: called with each record in order, steps that `log_every` leaves out of the log included; in the first
        process only.
    command: what the user typed, for `run.json`.

    Nothing is written before the whole configuration, data and model have been checked. Under torchrun, which starts
    the same command again when a process has died, a run in `out` with exactly this configuration is resumed.
    """
    folder = RunFolder(Path(out))
    with open_ranks(config.device, timeout_seconds=config.distributed.timeout_seconds) as ranks:
        if ranks.rank0_broadcast(lambda: _was_started(folder, config)):
            return _resume(folder, ranks, listeners)
        context = build(config, folder.path, ranks)
        with folder.lock() if ranks.is_rank0 else nullcontext():
            if ranks.is_rank0:
                found = environment(pick_device(config.device))
                folder.create(config, method=method, environment=found, command=command)
            _train(context, folder, method, listeners)
    return folder


def _was_started(folder: RunFolder, config: RunConfig) -> bool:
    """Whether an earlier start of this job has begun the run; raises `ConfigError` if another one has."""
    if is_launched() and (folder.path / "run.json").exists() and folder.config() == config:
        return True
    folder.require_new()
    return False


def resume(
    out: str | Path,
    overrides: Sequence[str] = (),
    *,
    listeners: Sequence[Listener] = (),
    accepts_changed_data: bool = False,
) -> RunFolder:
    """Resume the run in `out` from its newest checkpoint, or from the start where it has none yet.

    overrides: `a.b=c` for settings that may change on resume (`RunConfig.resumed_with`).
    listeners: those of `run`.
    accepts_changed_data: go on even if the data are not those that the run was trained on.

    The number of processes need not be that of before. Raises `CheckpointError` where the checkpoint is damaged or of
    another model, or the data have changed.
    """
    folder = RunFolder(Path(out))
    config = folder.config().resumed_with(overrides)
    with open_ranks(config.device, timeout_seconds=config.distributed.timeout_seconds) as ranks:
        return _resume(folder, ranks, listeners, overrides, accepts_changed_data)


def _resume(
    folder: RunFolder,
    ranks: Ranks,
    listeners: Sequence[Listener],
    overrides: Sequence[str] = (),
    accepts_changed_data: bool = False,
) -> RunFolder:
    folder.require_resumable()
    method, config = folder.read()["method"], folder.config().resumed_with(overrides)
    with folder.lock() if ranks.is_rank0 else nullcontext():
        _train(build(config, folder.path, ranks), folder, method, listeners, accepts_changed_data)
    return folder


def _train(
    context: TrainingContext,
    folder: RunFolder,
    method: str,
    listeners: Sequence[Listener],
    accepts_changed_data: bool = False,
) -> None:
    with stop_requests(second="is the same" if is_launched() else "stops") as stop:
        Trainer(
            context=context,
            folder=folder,
            setup=BLOCKS,
            method=method,
            listeners=listeners if context.ranks.is_rank0 else (),
            accepts_changed_data=accepts_changed_data,
            stop=stop,
        ).run()

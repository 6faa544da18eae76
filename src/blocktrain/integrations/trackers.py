"""A run's figures in TensorBoard, Weights & Biases, MLflow or Trackio, each through its own client.

    with Trackers(config, folder) as trackers:
        run(config, folder, listeners=[trackers])

The run's own log stays the truth; trackers get the figures that it gets. A resumed run continues the same run of the
tracker. Steps that were sent before a crash are taken again afterwards, with the same figures. They appear once:
TensorBoard purges them (`purge_step`), Weights & Biases drops steps that come out of order, and MLflow is asked which
steps it has. Trackio cannot be asked, so after a crash, though not after Ctrl-C, it shows those steps twice.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.errors import ConfigError
from blocktrain.records.run_records import Evaluation, Record, RunEnd, RunHeader, Step
from blocktrain.train.config import RunConfig
from blocktrain.train.run_folder import RunFolder

log = logging.getLogger(__name__)

FIGURES: dict[type[Record], dict[str, str]] = {  # record -> its fields that are sent, and the trackers' names for them
    Step: {"loss": "train/loss", "lr": "train/lr", "grad_norm": "train/grad_norm", "block": "train/block"},
    Evaluation: {
        "loss": "validation/loss",
        "loss_per_byte": "validation/loss_per_byte",
        "accuracy": "validation/accuracy",
    },
}
CLIENTS = {  # tracker -> (module that is its client, what to install)
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "trackio": ("trackio", "trackio"),
}


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a client needs to open the run."""

    key: str  # equal in every session of the run
    name: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    step: int  # of the first figures that will be sent


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """One run of one client. log: sends figures of a step. close: sends what is still waiting, and closes the run."""

    log: Callable[[Mapping[str, float], int], None]
    close: Callable[[], None]


class Trackers:
    """A listener that sends a run's figures to all of `config.tracking.to`; `folder` is the run's.

    Raises `ConfigError` at once where a client is not installed, and before the first step where it cannot be opened.
    If a client fails later, training continues without it, with a warning.
    """

    def __init__(self, config: RunConfig, folder: Path):
        self.config = config
        self.folder = RunFolder(folder)
        self._name = config.name
        self._open: dict[str, Tracker] | None = None
        for name in config.tracking.to:
            module, package = CLIENTS[name]
            if importlib.util.find_spec(module) is None:
                raise ConfigError(f"tracking.to names '{name}', whose client is not installed: pip install {package}")

    def __call__(self, record: Record) -> None:
        """Send the figures of a record. Steps that `log_every` leaves out of the run's log are not sent either."""
        match record:
            case RunHeader():
                self._name = record.name
            case RunEnd():
                self.close()
            case Step() if record.step % self.config.log_every == 0:
                self._send(record)
            case Evaluation():
                self._send(record)
            case _:
                pass

    def _send(self, record: Step | Evaluation) -> None:
        step = record.step
        if self._open is None:
            self._open = dict(self._opened(step))
        values = {name: getattr(record, field) for field, name in FIGURES[type(record)].items()}
        figures = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
        for name, tracker in list(self._open.items()):
            self._attempt(name, lambda tracker=tracker: tracker.log(figures, step))

    def close(self) -> None:
        """Send what is still waiting: the run has ended or was interrupted."""
        for name, tracker in list((self._open or {}).items()):
            self._attempt(name, tracker.close)
        self._open = None

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self, step: int) -> Iterator[tuple[str, Tracker]]:
        started = {key: value for key, value in self.folder.read().items() if key != "sessions"}
        tracked = TrackedRun(
            key=hashlib.sha256(json.dumps(started).encode()).hexdigest()[:16],
            name=self._name,
            project=self.config.tracking.project,
            folder=self.folder.path,
            config=self.config.to_mapping(),
            step=step,
        )
        for name in self.config.tracking.to:
            try:
                yield name, TRACKERS[name](tracked)
            except Exception as error:  # whatever the client raises
                raise ConfigError(
                    f"tracking.to names '{name}', which cannot be opened ({type(error).__name__}: {error}); "
                    "check its settings, or remove it from tracking.to"
                ) from error

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            log.warning("training continues without %s: %s: %s", name, type(error).__name__, error)
            assert self._open is not None
            self._open.pop(name)


def tensorboard(run: TrackedRun) -> Tracker:
    """Files in the run's folder, which `tensorboard --logdir runs` shows."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step)

    def log(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return Tracker(log=log, close=writer.close)


def weights_and_biases(run: TrackedRun) -> Tracker:
    """A run whose id is our key. Settings such as `WANDB_MODE=offline` are read by the client itself, which drops the
    figures of steps before its newest one."""
    import wandb  # pyright: ignore[reportMissingImports]

    opened = wandb.init(
        project=run.project, name=run.name, id=run.key, resume="allow", dir=str(run.folder), config=dict(run.config)
    )
    return Tracker(log=lambda figures, step: opened.log(dict(figures), step=step), close=opened.finish)


def mlflow(run: TrackedRun) -> Tracker:
    """A run with our key as a tag, at `MLFLOW_TRACKING_URI`. It is sent the figures that it does not have yet."""
    from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient()
    experiment = client.get_experiment_by_name(run.project)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(run.project)
    found = client.search_runs([experiment_id], filter_string=f"tags.`blocktrain.run` = '{run.key}'")
    newest: dict[str, int] = {}  # figure -> the last step that the run has it of
    if found:
        run_id = found[0].info.run_id
        for name in found[0].data.metrics:
            newest[name] = max(point.step for point in client.get_metric_history(run_id, name))
    else:
        created = client.create_run(experiment_id, run_name=run.name, tags={"blocktrain.run": run.key})
        run_id = created.info.run_id
        for table, value in run.config.items():
            for key, entry in value.items() if isinstance(value, dict) else [("", value)]:
                client.log_param(run_id, f"{table}.{key}".rstrip("."), entry)

    def log(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            if step > newest.get(name, -1):
                client.log_metric(run_id, name, value, timestamp=int(time.time() * 1000), step=step)
                newest[name] = step

    return Tracker(log=log, close=lambda: client.set_terminated(run_id))


def trackio(run: TrackedRun) -> Tracker:
    """A run named after ours and its key. Settings such as `TRACKIO_SPACE_ID` are read by the client itself, which
    sends its figures from a queue."""
    import trackio  # pyright: ignore[reportMissingImports]

    name = f"{run.name} {run.key[:6]}"
    opened = trackio.init(project=run.project, name=name, config=dict(run.config), resume="allow", embed=False)
    return Tracker(log=lambda figures, step: opened.log(dict(figures), step=step), close=opened.finish)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": tensorboard,
    "wandb": weights_and_biases,
    "mlflow": mlflow,
    "trackio": trackio,
}

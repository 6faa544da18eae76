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
from typing import Any, Protocol

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


class Tracker(Protocol):
    """One run of one client."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Send figures of a step."""
        ...

    def close(self) -> None:
        """Send what is still waiting, and close the run."""
        ...


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
                self._send(record, record.step)
            case Evaluation():
                self._send(record, record.step)
            case _:
                pass

    def _send(self, record: Record, step: int) -> None:
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


class TensorBoard:
    """Files in the run's folder, which `tensorboard --logdir runs` shows."""

    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write a scalar for each figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run whose id is our key. Settings such as `WANDB_MODE=offline` are read by the client itself."""

    def __init__(self, run: TrackedRun):
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.key,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Send the figures; the client drops those of steps before its newest one."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Wait for the upload."""
        self._run.finish()


class MLflow:
    """A run with our key as a tag, at `MLFLOW_TRACKING_URI`."""

    def __init__(self, run: TrackedRun):
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        found = self._client.search_runs([experiment_id], filter_string=f"tags.`blocktrain.run` = '{run.key}'")
        self._id = (found[0] if found else self._create(experiment_id, run)).info.run_id
        self._sent: dict[str, int] = {}  # figure -> its newest step
        for name in found[0].data.metrics if found else ():
            self._sent[name] = max(point.step for point in self._client.get_metric_history(self._id, name))

    def _create(self, experiment_id: str, run: TrackedRun) -> Any:
        created = self._client.create_run(experiment_id, run_name=run.name, tags={"blocktrain.run": run.key})
        for table, value in run.config.items():
            entries = value.items() if isinstance(value, dict) else [("", value)]
            for key, entry in entries:
                self._client.log_param(created.info.run_id, f"{table}.{key}".rstrip("."), entry)
        return created

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Send the figures that the run does not have yet."""
        for name, value in figures.items():
            if step > self._sent.get(name, -1):
                self._client.log_metric(self._id, name, value, timestamp=int(time.time() * 1000), step=step)
                self._sent[name] = step

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


class Trackio:
    """A run named after ours and its key. Settings such as `TRACKIO_SPACE_ID` are read by the client itself."""

    def __init__(self, run: TrackedRun):
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=run.project,
            name=f"{run.name} {run.key[:6]}",
            config=dict(run.config),
            resume="allow",
            embed=False,
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Put the figures into the client's queue."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Wait until the queue is empty."""
        self._run.finish()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}

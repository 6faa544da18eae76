"""A run's figures in TensorBoard, Weights & Biases, MLflow or Trackio, each through its own client.

    with Trackers(config, folder) as trackers:
        run(config, folder, listeners=[trackers])

The run's own log stays the truth; trackers are told what it is told. A resumed run goes on in the same run of the
tracker. Steps that were sent before a crash and are taken again afterwards (with the same figures) appear once: by
TensorBoard's `purge_step`, by the order of steps that Weights & Biases insists on, by asking MLflow. Trackio cannot be
asked, so after a crash, though not after Ctrl-C, it shows those steps twice.
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
from blocktrain.records.log import Event
from blocktrain.train.config import RunConfig
from blocktrain.train.run_folder import RunFolder

log = logging.getLogger(__name__)

FIGURES = {  # kind of event -> its figures, under the tracker's name for them
    "step": {"loss": "train/loss", "lr": "train/lr", "grad_norm": "train/grad_norm", "block": "train/block"},
    "evaluation": {
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
class Tracked:
    """The run as a tracker is told of it."""

    key: str  # the same for every session of the run
    name: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    step: int  # of the first figures to come


class Tracker(Protocol):
    """One run of one client."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Send figures of a step."""
        ...

    def close(self) -> None:
        """Send what is still waiting."""
        ...


class Trackers:
    """A listener that sends a run's figures to all of `config.tracking.to`; `folder` is the run's.

    Raises `ConfigError` at once where a client is not installed, and before the first step where it cannot be opened. A
    client that fails later is left out with a warning: training goes on.
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

    def __call__(self, record) -> None:
        """Send the event's figures; those of steps between two of `log_every` are left out, as in the run's log."""
        event: Event = record.to_event()
        if event["kind"] == "run":
            self._name = event["name"]
        elif event["kind"] == "end":
            self.close()
        names = FIGURES.get(event["kind"], {})
        if not names or (event["kind"] == "step" and event["step"] % self.config.log_every):
            return
        if self._open is None:
            self._open = dict(self._opened(event["step"]))
        figures = {
            ours: float(event[theirs])
            for theirs, ours in names.items()
            if event.get(theirs) is not None and math.isfinite(event[theirs])
        }
        for name, tracker in list(self._open.items()):
            self._attempt(name, lambda tracker=tracker: tracker.log(figures, event["step"]))

    def close(self) -> None:
        """Send what is still waiting: the run has ended, or is interrupted."""
        for name, tracker in list((self._open or {}).items()):
            self._attempt(name, tracker.close)
        self._open = None

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self, step: int) -> Iterator[tuple[str, Tracker]]:
        started = {key: value for key, value in self.folder.read().items() if key != "sessions"}
        tracked = Tracked(
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
            except Exception as error:  # whatever a foreign client raises
                raise ConfigError(
                    f"tracking.to names '{name}', which cannot be opened ({type(error).__name__}: {error}); "
                    "see to its settings, or leave it out"
                ) from error

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            log.warning("training goes on without %s: %s: %s", name, type(error).__name__, error)
            assert self._open is not None
            self._open.pop(name)


class TensorBoard:
    """Files in the run's folder: `tensorboard --logdir runs`."""

    def __init__(self, run: Tracked):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """One scalar each."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the file's end."""
        self._writer.close()


class WeightsAndBiases:
    """A run with the id of ours; `WANDB_MODE=offline` and the like are the client's own."""

    def __init__(self, run: Tracked):
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
        """The client drops steps below its newest."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Wait for the upload."""
        self._run.finish()


class MLflow:
    """A run that carries our key as a tag; `MLFLOW_TRACKING_URI` says where."""

    def __init__(self, run: Tracked):
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(run.project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        found = self._client.search_runs([place], filter_string=f"tags.`blocktrain.run` = '{run.key}'")
        self._id = (found[0] if found else self._create(place, run)).info.run_id
        self._sent: dict[str, int] = {}  # figure -> its newest step
        for name in found[0].data.metrics if found else ():
            self._sent[name] = max(point.step for point in self._client.get_metric_history(self._id, name))

    def _create(self, place: str, run: Tracked) -> Any:
        created = self._client.create_run(place, run_name=run.name, tags={"blocktrain.run": run.key})
        for table, value in run.config.items():
            entries = value.items() if isinstance(value, dict) else [("", value)]
            for key, entry in entries:
                self._client.log_param(created.info.run_id, f"{table}.{key}".rstrip("."), entry)
        return created

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """What is not there yet."""
        for name, value in figures.items():
            if step > self._sent.get(name, -1):
                self._client.log_metric(self._id, name, value, timestamp=int(time.time() * 1000), step=step)
                self._sent[name] = step

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


class Trackio:
    """A run called after ours and its key; `TRACKIO_SPACE_ID` and the like are the client's own."""

    def __init__(self, run: Tracked):
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=run.project,
            name=f"{run.name} {run.key[:6]}",
            config=dict(run.config),
            resume="allow",
            embed=False,
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Put in the client's queue."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Wait for the queue."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Tracked], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}

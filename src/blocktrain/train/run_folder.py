"""A run is a folder.

run.json         resolved configuration, environment, command, sessions
events.jsonl     what happened, one record a line
checkpoints/     see checkpoint.py
report.html      made from events.jsonl
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blocktrain.errors import CheckpointError, ConfigError, storage_errors
from blocktrain.outputs import write_output
from blocktrain.parse import parse_json
from blocktrain.train.config import RunConfig


@dataclass(frozen=True)
class RunFolder:
    """Where a run's files are."""

    path: Path

    @property
    def events(self) -> Path:
        """`events.jsonl`."""
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        """`report.html`."""
        return self.path / "report.html"

    def require_new(self) -> None:
        """Raises `ConfigError` if the folder already holds a run."""
        if (self.path / "run.json").exists():
            raise ConfigError(
                f"'{self.path}' already holds a run; go on with 'blocktrain resume {self.path}' or choose another --out"
            )

    def create(
        self, config: RunConfig, *, method: str, environment: dict[str, Any], command: str, resumable: bool = True
    ) -> None:
        """Make the folder and its `run.json`; a folder that already holds a run is an error. resumable: false for a
        method of another package, which keeps no checkpoints."""
        self.require_new()
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self._write(
            {
                "method": method,
                "resumable": resumable,
                "config": config.to_mapping(),
                "environment": environment,
                "command": command,
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "sessions": [],
            }
        )

    def read(self) -> dict[str, Any]:
        """The contents of `run.json`; raises `ConfigError` where there is none."""
        path = self.path / "run.json"
        try:
            contents = parse_json(path.read_bytes(), f"'{path}'", ConfigError)
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"'{self.path}' is not the folder of a run: it has no run.json") from None
        except OSError as error:
            raise ConfigError(f"'{path}' cannot be read: {error.strerror}") from None
        needed = {"config": dict, "method": str, "sessions": list}
        if not isinstance(contents, dict) or not all(isinstance(contents.get(key), needed[key]) for key in needed):
            raise ConfigError(f"'{path}' is damaged: it lacks the configuration, the method or the sessions of a run")
        return contents

    def require_resumable(self) -> None:
        """Raises `CheckpointError` for a run that another package's method trained."""
        contents = self.read()
        if not contents.get("resumable", True):
            raise CheckpointError(
                f"the run in '{self.path}' is of method '{contents['method']}', which keeps no checkpoints; "
                "run the same comparison again: methods that did not finish start from the beginning"
            )

    def config(self) -> RunConfig:
        """The configuration the run was started with, or moved to."""
        return RunConfig.from_mapping(self.read()["config"])

    def replace_config(self, config: RunConfig) -> None:
        """Note the configuration that the run continues with."""
        contents = self.read()
        if contents["config"] != json.loads(json.dumps(config.to_mapping())):
            self._write({**contents, "config": config.to_mapping()})

    def add_session(self, *, step: int, processes: int = 1) -> None:
        """Note in `run.json` (not in the log, which must come out the same) that training goes on at `step`."""
        contents = self.read()
        started = datetime.now(UTC).isoformat(timespec="seconds")
        contents["sessions"].append({"started": started, "step": step, "processes": processes})
        self._write(contents)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second process from training into the same folder; the lock goes with the process."""
        with storage_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / ".lock", os.O_CREAT | os.O_RDWR, mode=0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # held by another process, or a file system without locks
            os.close(handle)
            raise ConfigError(
                f"'{self.path}' cannot be locked ({error.strerror}): another process may be training in it; "
                "wait for it or choose another --out"
            ) from None
        try:
            yield
        finally:
            os.close(handle)

    def _write(self, contents: dict[str, Any]) -> None:
        write_output(self.path / "run.json", json.dumps(contents, indent=1))

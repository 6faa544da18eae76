"""One runner for every experiment: cases, resumed where they stopped, within a budget of minutes.

    experiments/NAME/cases.py     CASES, and how their results become the table of README.md
    experiments/NAME/result.json  one record a finished case: figures, scale, seed, hardware, versions, date, command

A case that trains writes a run folder; when the budget is over it is stopped as by Ctrl-C, with a checkpoint, and the
next call goes on. A case that cannot run here says why and leaves no record.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tabling import put

from blocktrain.errors import BlocktrainError, Interrupted
from blocktrain.runtime import environment

HERE = Path(__file__).resolve().parent

Figures = dict[str, Any]
Results = Mapping[str, Mapping[str, Any]]  # key of the case -> record


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a case runs: on which device, with which folders of data and for runs, and how many minutes are left."""

    device: torch.device
    data: Path | None
    work: Path

    def runs(self, of: str, name: str) -> Path:
        """The folder of the runs that the case called `name` takes."""
        return self.work / of / folder_name(name)


def folder_name(name: str) -> str:
    """A method's name as that of a folder."""
    return name.replace(", ", "-").replace(" ", "-")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell or row. scale: in words, beside the result: what was made smaller than the paper. seed: of the run."""

    name: str
    scale: str
    run: Callable[[Place], Figures]
    seed: int = 0

    @property
    def key(self) -> str:
        """Under which its result is kept."""
        return f"{self.name} [{self.scale}]"

    def is_called(self, text: str) -> bool:
        """Whether its name has `text` in it; a text with a bracket is looked for in its key."""
        return text in (self.key if "[" in text else self.name)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """cases: of a scale ("short", "card", "tiny"). table: the README's, of all results so far."""

    name: str
    cases: Callable[[str], Sequence[Case]]
    table: Callable[[Results], str]


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Results so far."""
    return json.loads(path.read_text()) if path.exists() else {}


def run_cases(cases: Sequence[Case], place: Place, result: Path, *, minutes: float) -> bool:
    """Run what `result` does not hold yet; whether all of it is done."""
    until = time.monotonic() + 60 * minutes
    for case in cases:
        if case.key in read(result):
            continue
        left = until - time.monotonic()
        if left <= 0:
            print(f"{case.key}: the budget is over; call again to go on")
            return False
        started = time.monotonic()
        try:
            with stopped_after(left):
                figures = case.run(place)
        except Interrupted as stop:
            print(f"{case.key}: {stop}")
            return False
        except BlocktrainError as error:
            print(f"{case.key}: cannot run here: {error}")
            continue
        known = read(result)  # again: another call may have added to it
        known[case.key] = {
            "case": case.name,
            "scale": case.scale,
            "seed": case.seed,
            "figures": figures,
            "environment": environment(place.device),
            "date": datetime.now(UTC).date().isoformat(),
            "command": _command(),
        }
        result.parent.mkdir(parents=True, exist_ok=True)
        partial = result.with_suffix(".partial")
        partial.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        partial.replace(result)
        print(f"{case.key}: done in {time.monotonic() - started:.0f} s")
    return True


def _command() -> str:
    """How this was called, without the folders of one machine."""
    script = Path(sys.argv[0]).resolve()
    shown = f"experiments/{script.relative_to(HERE)}" if script.is_relative_to(HERE) else script.name
    words = ["FOLDER" if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join(["python", shown, *words])


@contextlib.contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Inside, a run is asked to stop after `seconds`, as by Ctrl-C."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt:  # nothing was being trained that could write a checkpoint
        raise Interrupted("stopped; it begins anew at the next call", signal_number=signal.SIGINT) from None
    finally:
        timer.cancel()


def write_table(experiment: Experiment) -> None:
    """Put the table of what is known into the experiment's README, between its markers."""
    put(HERE / experiment.name / "README.md", "tables.py", section(experiment))


def section(experiment: Experiment) -> str:
    """The table, and under it where, when and how its results were made."""
    results = read(HERE / experiment.name / "result.json")
    if not results:
        return "No results yet.\n"
    made = sorted({_made(record) for record in results.values()})
    return experiment.table(results) + "\n" + "\n".join(f"- {line}" for line in made) + "\n"


def _made(record: Mapping[str, Any]) -> str:
    there = record["environment"]
    hardware = f"{there['device']} ({there['processor']}, {there['threads']} threads)"
    versions = f"torch {there['torch']}, transformers {there['transformers']}"
    return f"{record['date']}, {hardware}, {versions}: `{record['command']}`"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; floats with three decimals, None as a dash."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

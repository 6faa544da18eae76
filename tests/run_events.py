"""What tests of whole runs share: the events of a log, and a crash at a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blocktrain.records.log import Event, read_events
from blocktrain.records.run_records import Record, Step


class Crash(BaseException):
    """As sudden as a power failure: no handler runs, no checkpoint is written."""


def crash_at(step: int) -> Callable[[Record], None]:
    """A listener that crashes after `step`."""

    def listen(record: Record) -> None:
        if isinstance(record, Step) and record.step == step:
            raise Crash

    return listen


def events_of(run: Path, kind: str) -> list[Event]:
    """The events of one kind in the log of `run`, in order."""
    return [event for event in read_events(run / "events.jsonl") if event["kind"] == kind]

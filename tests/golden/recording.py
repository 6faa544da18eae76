"""What is kept of a run, how it is written, and how two recordings are compared.

    machine    versions, and a fingerprint of the arithmetic that bits depend on
    folders    of each run: its records without clocks and peaks, the SHA-256 of every file of its checkpoints, and the
               steps at which it was gone on with
    exported   SHA-256 of the exported weights
    trials     of a comparison

Where versions and fingerprint are those of the recording, everything is compared bit for bit. Elsewhere the same
things must be said in the same order, with the same whole numbers and words, and numbers that are close.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Recording = dict[str, Any]

HERE = Path(__file__).resolve().parent

# Values that were renamed on purpose after the recordings were made: (kind of record, key) -> recorded -> today's.
RENAMED_VALUES: dict[tuple[str, str], dict[str, str]] = {
    ("run", "layout"): {"rows": "data", "layers": "pipeline", "shards": "fsdp"},  # `distributed.layout`
}

RENAMED_PARTS = {"optimizer": "moments"}  # parts of memory in the `cost` record

# Keys of a run's record that came later, with the values that leave a run what it was: table -> key -> value.
ADDED: dict[str, dict[str, str]] = {"memory": {"frozen_compute": "exact"}}

# Keys of a record that are measured.
MEASURED = {"seconds", "peak_memory_bytes", "fill_seconds", "wait_seconds", "seconds_saved"}

_NUMBER = re.compile(r"\d+\.\d+")
COUNTED = ("cost", "memory")  # records counted from PyTorch's own operations, which differ between its versions


def recorded_folder(folder: Path) -> dict[str, Any]:
    """The records of a run, and the checksums of its checkpoints (none of a method that keeps none)."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    events = [{k: v for k, v in json.loads(line).items() if k not in MEASURED} for line in lines]
    manifests = sorted(folder.glob("checkpoints/*/checkpoint.json"))
    sessions = json.loads((folder / "run.json").read_text())["sessions"]
    return {
        "sessions": [session["step"] for session in sessions],
        "events": events,
        "checkpoints": {
            manifest.parent.name: {
                name: entry["sha256"] for name, entry in sorted(json.loads(manifest.read_text())["files"].items())
            }
            for manifest in manifests
        },
    }


def path_of(name: str) -> Path:
    """Where the recording of a run is kept."""
    return HERE / f"{name}.json"


def written(recording: Recording) -> str:
    """As JSON with one record, or the files of one checkpoint, a line."""
    return "\n".join(_lines(recording, 0)) + "\n"


def _lines(value: Any, depth: int, before: str = "", after: str = "") -> Iterator[str]:
    """Containers are opened as far as the list of records, which lies four deep."""
    indent = " " * depth
    if depth >= 4 or not isinstance(value, dict | list) or not value:
        yield f"{indent}{before}{json.dumps(value)}{after}"
        return
    is_table = isinstance(value, dict)
    items = [(f"{json.dumps(k)}: ", v) for k, v in value.items()] if is_table else [("", v) for v in value]
    yield indent + before + ("{" if is_table else "[")
    for at, (key, item) in enumerate(items):
        yield from _lines(item, depth + 1, key, "," if at < len(items) - 1 else "")
    yield indent + ("}" if is_table else "]") + after


def _with_renamed_parts(memory: dict[str, int]) -> dict[str, int]:
    return {RENAMED_PARTS.get(part, part): count for part, count in memory.items()}


def renamed(recording: Recording) -> Recording:
    """A recording with today's names in place of those of `RENAMED_VALUES` and `RENAMED_PARTS`, and with `ADDED`."""

    def rename(event: dict[str, Any]) -> dict[str, Any]:
        tables = {key: RENAMED_VALUES.get((event["kind"], key), {}) for key in event}
        event = {key: tables[key].get(value, value) if tables[key] else value for key, value in event.items()}
        if event["kind"] == "run":
            event |= {table: {**event[table], **keys} for table, keys in ADDED.items() if table in event}
        if event["kind"] == "cost":
            full, *blocks = (
                _with_renamed_parts(part) for part in (event["memory"]["full"], *event["memory"]["blocks"])
            )
            event["memory"] = {"full": full, "blocks": blocks}
        return event

    folders = {
        name: {**folder, "events": [rename(event) for event in folder["events"]]}
        for name, folder in recording["folders"].items()
    }
    return {**recording, "folders": folders}


# -- comparing --------------------------------------------------------------------------------------------------------


def differences(kept: Recording, found: Recording, tolerance: float) -> list[str]:
    """Where a run has come out differently from its recording, one line each. tolerance: relative, of numbers that
    another machine has computed."""
    if "failed" in found:
        return [found["failed"]]
    if kept["machine"] == found["machine"]:
        return [*_exactly(kept, found, "")]
    same_versions = all(kept["machine"][name] == found["machine"][name] for name in ("torch", "transformers"))
    return [*_closely(_without_bits(kept), _without_bits(found), "", tolerance=tolerance, counted=same_versions)]


def _exactly(kept: Any, found: Any, where: str) -> Iterator[str]:
    if type(kept) is not type(found):
        yield f"{where}: {_short(found)} instead of {_short(kept)}"
    elif isinstance(kept, dict | list):
        yield from _inside(kept, found, where, _exactly)
    elif kept != found:  # nan is written as text
        yield f"{where}: {_short(found)} instead of {_short(kept)}"


def _closely(kept: Any, found: Any, where: str, *, tolerance: float, counted: bool) -> Iterator[str]:
    """counted: whether FLOPs and bytes, too, must be the same."""

    def inside(mine: Any, theirs: Any, place: str) -> Iterator[str]:
        if isinstance(mine, dict) and mine.get("kind") in COUNTED and not counted:
            mine, theirs = (sorted(each) for each in (mine, theirs))
        yield from _closely(mine, theirs, place, tolerance=tolerance, counted=counted)

    if type(kept) is not type(found):
        yield f"{where}: {_short(found)} instead of {_short(kept)}"
    elif isinstance(kept, dict | list):
        yield from _inside(kept, found, where, inside)
    elif isinstance(kept, str) and _NUMBER.search(kept):  # "training loss on a plateau at 5.542"
        pairs = zip(_NUMBER.findall(kept), _NUMBER.findall(found), strict=False)
        close = all(math.isclose(float(mine), float(theirs), rel_tol=tolerance) for mine, theirs in pairs)
        if not close or _NUMBER.sub("", kept) != _NUMBER.sub("", found):
            yield f"{where}: {_short(found)} instead of {_short(kept)}"
    elif isinstance(kept, float):
        if not math.isclose(kept, found, rel_tol=tolerance):
            yield f"{where}: {found!r} instead of {kept!r}, which is not within {tolerance:g} of it"
    elif kept != found:
        yield f"{where}: {_short(found)} instead of {_short(kept)}"


def _inside(kept: Any, found: Any, where: str, compare: Callable[[Any, Any, str], Iterator[str]]) -> Iterator[str]:
    """Compares two tables or two lists: what only one of them has, and what differs in both."""
    if isinstance(kept, list):
        if len(kept) != len(found):
            yield f"{where}: {len(found)} instead of {len(kept)}"
        pairs = [(str(at), mine, theirs) for at, (mine, theirs) in enumerate(zip(kept, found, strict=False))]
    else:
        yield from (f"{where}/{key}: missing" for key in kept.keys() - found.keys())
        yield from (f"{where}/{key}: not in the recording" for key in found.keys() - kept.keys())
        pairs = [(key, kept[key], found[key]) for key in kept if key in found]
    for key, mine, theirs in pairs:
        yield from compare(mine, theirs, f"{where}/{key}{_kind(mine)}")


def _kind(value: Any) -> str:
    """The kind and the step of a record, in parentheses; empty for any other value."""
    if not isinstance(value, dict) or "kind" not in value:
        return ""
    return f" ({value['kind']}, step {value['step']})" if "step" in value else f" ({value['kind']})"


def _without_bits(recording: Recording) -> Recording:
    """Without the machine and all checksums, of which the names stay."""
    folders = {
        name: {**folder, "checkpoints": {place: list(files) for place, files in folder["checkpoints"].items()}}
        for name, folder in recording["folders"].items()
    }
    return {**recording, "machine": {}, "folders": folders, "exported": list(recording.get("exported", ()))}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

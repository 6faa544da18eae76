"""Whatever is changed inside the package, a run stays what it was: the same records, and the same bits in checkpoints.

The recordings beside this file were made by `record.py`. Where one differs, the change that did it is a mistake, or is
meant and named in the changelog; then it is recorded again.
"""

from __future__ import annotations

import copy
import fcntl
import json
import math
from typing import Any

import pytest
from drive import carry_out
from recording import HERE, Recording, differences, path_of, renamed, written
from runs import FINE, RUNS

MOST_BYTES = 600_000


def kept(name: str) -> Recording:
    return json.loads(path_of(name).read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def carried_out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    """All runs that this session's tests ask for, carried out once, in one process; by the first of several workers."""
    items: list[Any] = request.session.items
    asked = [item.callspec.params["name"] for item in items if _is_golden(item)]
    mine = tmp_path_factory.getbasetemp()
    folder = (mine.parent if hasattr(request.config, "workerinput") else mine) / "golden"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            return carry_out(folder, asked)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in asked}


def _is_golden(item: Any) -> bool:
    return getattr(item, "originalname", "") == test_a_run_is_what_it_was.__name__


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_what_it_was(carried_out: dict[str, Recording], name: str) -> None:
    found = differences(renamed(kept(name)), carried_out[name], RUNS[name].tolerance)
    assert not found, f"{name} ({RUNS[name].covers}) has changed:\n" + "\n".join(found[:20])


def test_recordings_are_those_of_the_table() -> None:
    """None is missing, left over or cut short, and all are of one machine."""
    files = sorted(HERE.glob("*.json"))
    assert {file.stem for file in files} == set(RUNS)
    assert sum(file.stat().st_size for file in files) < MOST_BYTES
    recordings = [kept(name) for name in RUNS]
    assert all(recording["machine"] == recordings[0]["machine"] for recording in recordings)
    for (name, run), recording in zip(RUNS.items(), recordings, strict=True):
        assert recording["covers"] == run.covers
        assert tuple(recording["folders"]) == run.folders
        assert all(folder["events"][-1]["kind"] == "end" for folder in recording["folders"].values()), name
        assert written(recording) == path_of(name).read_text(encoding="utf-8")


def test_recordings_show_what_they_are_kept_for() -> None:
    """Rows were read from a cache, steps skipped, sessions interrupted, and answers right."""

    def of(name: str, kind: str, folder: str = ".") -> list[dict[str, Any]]:
        return [event for event in kept(name)["folders"][folder]["events"] if event["kind"] == kind]

    for name in (
        "cache-in-memory",
        "cache-on-disk",
        "bf16",
        "nf4",
        "resnet",
        "interrupted",
        "two-processes",
        "pipeline",
    ):
        assert any(event["hits"] for event in of(name, "cached")), name
    assert any(event["left_out"] for event in of("growing", "visit") if "left_out" in event)
    assert [event["skipped"] for event in of("skipped", "step")].count(True) > 5
    assert len(kept("interrupted")["folders"]["."]["sessions"]) == 3
    assert {event["correct"] for event in of("chat", "sample")} == {False, True}
    assert all("plateau" in event["reason"] for event in of("rows-of-matrices", "retire"))
    assert "target" in of("classifier", "end")[0]["reason"]
    assert of("compared", "run", "lisa")[0]["method"] == "lisa"
    assert [of(name, "run")[0]["processes"] for name in RUNS if RUNS[name].processes == 2] == [2] * 4


def changed(recording: Recording, change: str) -> Recording:
    """A recording in which one thing is not as it was."""
    other = copy.deepcopy(recording)
    folder = other["folders"]["."]
    step = next(event for event in folder["events"] if event["kind"] == "step")
    match change:
        case "a bit":
            step["loss"] = math.nextafter(step["loss"], 0)
        case "a number":
            step["loss"] *= 1 + 2 * FINE
        case "a whole number":
            step["tokens"] += 1
        case "a word":
            folder["events"][-1]["reason"] += "!"
        case "a key":
            del step["grad_norm"]
        case "another key":
            step["more"] = None
        case "a record":
            folder["events"].remove(step)
        case "a checksum":
            files = next(iter(folder["checkpoints"].values()))
            files["weights-0.safetensors"] = "0" * 64
        case "a file":
            del next(iter(folder["checkpoints"].values()))["weights-0.safetensors"]
    return other


SEEN_ANYWHERE = ["a number", "a whole number", "a word", "a key", "another key", "a record", "a file"]


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("change", [*SEEN_ANYWHERE, "a bit", "a checksum"])
def test_a_change_is_found(change: str, elsewhere: bool) -> None:
    """Whatever it is on the machine of the recording; on another one, bits may differ."""
    before = kept("blocks")
    after = changed(before, change)
    if elsewhere:
        before = {**before, "machine": {**before["machine"], "arithmetic": "another"}}
        assert not differences(before, kept("blocks"), FINE)
    assert bool(differences(before, after, FINE)) == (change in SEEN_ANYWHERE or not elsewhere)


def test_a_run_that_failed_says_why() -> None:
    assert differences(kept("blocks"), {"failed": "Traceback ..."}, FINE) == ["Traceback ..."]

"""A technique of one's own is one class and one registration: hooks around the run, its visits, steps and batches."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import blocktrain as bt
from blocktrain.chain.chain import Layer
from blocktrain.data.sampling import StepRows
from blocktrain.errors import ConfigError
from blocktrain.records.run_records import Record
from blocktrain.schedule import Visit
from blocktrain.train.config import EXTRA_TABLES, RunConfig
from blocktrain.train.technique import Batch, Position, Technique, Techniques
from blocktrain.train.techniques import TECHNIQUES, register_technique

from ..run_events import Crash, crash_at


class Recorder(Technique):
    """Notes which hook is called when, and counts its steps across a resume."""

    def __init__(self, label: str = "") -> None:
        self.label = label
        self.calls: list[str] = []
        self.steps = 0

    @contextmanager
    def around_run(self) -> Iterator[None]:
        self.calls.append(f"{self.label}run")
        yield
        self.calls.append(f"{self.label}run over")

    def before_visit(self, visit: Visit) -> None:
        self.calls.append(f"{self.label}before visit {visit.index}")

    def open_visit(self, visit: Visit, left_out: Sequence[Layer], position: Position) -> Sequence[Record]:
        self.calls.append(f"{self.label}open visit {visit.index}")
        return ()

    @contextmanager
    def around_step(self, visit: Visit) -> Iterator[None]:
        yield
        self.steps += 1

    @contextmanager
    def around_batch(self, rows: StepRows, batch: Batch) -> Iterator[None]:
        self.calls.append(f"{self.label}batch of {len(rows.rows)}")
        yield

    def flops_saved(self) -> int:
        return 1

    def close_visit(self, position: Position) -> Sequence[Record]:
        self.calls.append(f"{self.label}close at step {position.step}")
        return ()

    def state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state(self, state: Any) -> None:
        self.steps = state["steps"]


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Those that runs have built since the test began; each run builds one."""
    built: list[Recorder] = []

    def build(*_: Any) -> Recorder:
        built.append(Recorder())
        return built[-1]

    monkeypatch.setitem(TECHNIQUES, "recorder", build)
    return built


def test_hooks_are_called_around_the_run_its_visits_and_batches(tiny, tmp_path: Path, recorders) -> None:
    bt.run(tiny("schedule.visit=1 steps", "batch.micro_rows=2"), tmp_path / "run")
    visits = [
        [f"before visit {at}", f"open visit {at}", "batch of 2", "batch of 2", f"close at step {at + 1}"]
        for at in range(3)
    ]
    assert recorders[0].calls == ["run", *(call for visit in visits for call in visit), "run over"]


def test_what_a_technique_saves_is_taken_off_the_run_s_flops(tiny, tmp_path: Path, recorders) -> None:
    from blocktrain.report.run import RunRecord

    with_it = RunRecord.load(bt.run(tiny("schedule.visit=1 steps"), tmp_path / "with").path)
    TECHNIQUES.pop("recorder")
    without = RunRecord.load(bt.run(tiny("schedule.visit=1 steps"), tmp_path / "without").path)
    assert with_it.end is not None
    assert without.end is not None
    assert without.end.flops is not None
    assert with_it.end.flops == without.end.flops - 3


def test_its_state_goes_through_a_checkpoint(tiny, tmp_path: Path, recorders) -> None:
    with pytest.raises(Crash):
        bt.run(tiny("checkpoint.every=5 steps"), tmp_path / "run", listeners=[crash_at(6)])
    bt.resume(tmp_path / "run")
    # Twelve steps and three openings in all: five steps and two openings before the checkpoint, and one opening of the
    # visit that was resumed.
    assert recorders[1].steps == 12 + 3 + 1
    assert [call for call in recorders[1].calls if call.startswith("before")] == ["before visit 2"]


def test_techniques_are_nested_in_their_order() -> None:
    first, second = Recorder("first: "), Recorder("second: ")
    second.calls = first.calls
    with Techniques({"first": first, "second": second}).around_run():
        first.calls.append("training")
    assert first.calls == ["first: run", "second: run", "training", "second: run over", "first: run over"]


@dataclass(frozen=True, kw_only=True)
class LoudConfig:
    """A table of its own.

    volume: how loud.
    """

    volume: float = 1.0


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A module `loud_plugin`, not part of the package, that registers a technique with a table when it is imported."""
    volumes: list[float] = []

    def build(context: Any, *_: Any) -> Technique | None:
        if "loud" not in context.config.tables:
            return None
        volumes.append(context.config.tables["loud"].volume)
        return Technique()

    monkeypatch.setitem(sys.modules, "loud_plugin", types.ModuleType("loud_plugin"))
    register_technique("loud", build, table=LoudConfig)
    yield volumes
    del TECHNIQUES["loud"], EXTRA_TABLES["loud"]


def test_a_technique_may_have_a_table_of_its_own(tiny_mapping, tmp_path: Path, plugin: list[float]) -> None:
    config = RunConfig.from_mapping({**tiny_mapping, "imports": ["loud_plugin"], "loud": {"volume": 11.0}})
    bt.run(config, tmp_path / "run")
    bt.resume(tmp_path / "run")
    assert plugin == [11.0, 11.0]
    with pytest.raises(ConfigError, match=r"unknown key 'loud\.volum'; did you mean 'volume'"):
        RunConfig.from_mapping({**tiny_mapping, "loud": {"volum": 3.0}})


def test_a_module_that_cannot_be_imported_is_named(tiny_mapping) -> None:
    with pytest.raises(ConfigError, match="imports: module 'no_such_plugin' cannot be imported"):
        RunConfig.from_mapping({**tiny_mapping, "imports": ["no_such_plugin"]})


def test_a_technique_from_outside_lies_inside_the_package_s_own_and_cannot_replace_one() -> None:
    """In a process of its own, where a user's module is the first to import anything."""
    script = (
        "from blocktrain.train.techniques import TECHNIQUES, register_technique\n"
        "register_technique('mine', lambda *_: None)\n"
        "print(*TECHNIQUES)\n"
        "try: register_technique('growth', lambda *_: None)\n"
        "except ValueError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[0].split() == ["kernels", "memory_saving", "growth", "prefix_cache", "mine"]
    assert out[1].startswith("'growth' is a technique")


@pytest.mark.parametrize("name", ["prefix_cache", "text", "optimizer"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is a technique, a kind of data or a key"):
        register_technique(name, lambda *_: None)

"""The shared runner: what is done is kept, what cannot run leaves nothing, and a README shows its results alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import runner
import torch
from run import NAMES, experiment, main

from blocktrain.errors import ConfigError


@pytest.fixture
def place(tmp_path: Path) -> runner.Place:
    return runner.Place(device=torch.device("cpu"), data=None, work=tmp_path)


def case(name: str, run: object) -> runner.Case:
    return runner.Case(name=name, scale="tiny", run=run)  # pyright: ignore[reportArgumentType] - a lambda


def test_a_finished_case_is_not_run_again(place: runner.Place, tmp_path: Path) -> None:
    calls: list[str] = []
    cases = [case(name, lambda _, name=name: {"calls": len(calls), "seen": calls.append(name)}) for name in "ab"]
    result = tmp_path / "result.json"
    assert runner.run_cases(cases[:1], place, result, minutes=1)
    assert runner.run_cases(cases, place, result, minutes=1)
    assert calls == ["a", "b"]
    record = runner.read(result)["b [tiny]"]
    assert record["figures"]["calls"] == 1
    assert {"environment", "date", "command", "seed"} <= record.keys()


def test_no_budget_is_left_for_the_second_case(place: runner.Place, tmp_path: Path) -> None:
    cases = [case("slow", lambda _: time.sleep(0.2) or {}), case("next", lambda _: {})]
    assert not runner.run_cases(cases, place, tmp_path / "result.json", minutes=0.1 / 60)
    assert runner.read(tmp_path / "result.json").keys() <= {"slow [tiny]"}


def test_what_cannot_run_here_leaves_no_record(
    place: runner.Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: runner.Place) -> runner.Figures:
        raise ConfigError("it needs a CUDA device")

    assert runner.run_cases([case("gpu", refuse)], place, tmp_path / "result.json", minutes=1)
    assert runner.read(tmp_path / "result.json") == {}
    assert "cannot run here: it needs a CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_is_what_the_results_give(name: str) -> None:
    assert runner.section(experiment(name)) in (runner.HERE / name / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_no_two_cases_share_a_result(name: str) -> None:
    for scale in ("tiny", "short", "card"):
        keys = [case.key for case in experiment(name).cases(scale)]
        assert len(set(keys)) == len(keys) > 0


def test_real_data_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["table2", "--scale", "tiny", "--device", "cpu", "--only", "GPT-2, SGD, bcd"]
    assert main([*arguments, "--result", str(tmp_path), "--work", str(tmp_path)]) == 0
    assert "give --data FOLDER" in capsys.readouterr().out


@pytest.mark.slow
def test_a_case_of_table_2_trains(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["table2", "--scale", "tiny", "--device", "cpu", "--only", "GPT-2, Adam", "--data", str(shared_data)]
    assert main([*arguments, "--result", str(tmp_path), "--work", str(tmp_path / "runs"), "--budget", "5"]) == 0
    results = runner.read(tmp_path / "table2.json")
    assert [record["figures"]["steps"] for record in results.values()] == [6, 6]
    table = experiment("table2").table(results)
    assert "| GPT-2 | Adam | 6.5988 / 6.6263 |" in table
    assert str(shared_data) not in (tmp_path / "table2.json").read_text()  # no folder of this machine


def test_a_case_is_found_by_its_name_and_by_name_and_scale() -> None:
    full = runner.Case(name="full", scale="40 full steps", run=lambda _: {})
    blocks = runner.Case(name="blocks", scale="40 full steps", run=lambda _: {})
    assert [each.name for each in (full, blocks) if each.is_called("full")] == ["full"]
    assert [each.name for each in (full, blocks) if each.is_called("blocks [40")] == ["blocks"]

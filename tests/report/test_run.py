"""Reading a run folder: what is there, what is torn, what is unknown."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from blocktrain.errors import DataError
from blocktrain.report.run import RunRecord

MakeRun = Callable[..., Path]


def test_every_kind_of_record_is_read(make_run: MakeRun):
    run = RunRecord.load(make_run(sweeps=2, steps=10, every=5))
    assert run.header.model == "GPT-2"
    assert [block.parameters for block in run.header.blocks] == [500_000, 420_000, 380_000]
    assert (len(run.visits), len(run.retirements), len(run.steps), len(run.evaluations)) == (6, 6, 60, 13)
    assert run.end is not None
    assert run.end.steps == run.steps_done == 60
    assert run.details["command"] == "blocktrain train"


def test_a_torn_last_line_is_left_out(make_run: MakeRun):
    folder = make_run(sweeps=1, steps=10, every=5, finish=False)
    path = folder / "events.jsonl"
    whole = RunRecord.load(folder)
    path.write_bytes(path.read_bytes() + b'{"kind":"step","st')
    torn = RunRecord.load(folder)
    assert torn.end is None
    assert torn.steps == whole.steps


def test_unknown_fields_and_kinds_are_ignored(make_run: MakeRun):
    folder = make_run(sweeps=1, steps=4, every=2)
    path = folder / "events.jsonl"
    before = RunRecord.load(folder)
    path.write_text(
        path.read_text().replace('"kind":"step"', '"kind":"step","colour":"red"') + '{"kind":"poem"}\n[1]\n'
    )
    assert RunRecord.load(folder) == before


def test_numbers_that_json_cannot_hold_come_back(make_run: MakeRun):
    run = RunRecord.load(make_run(sweeps=1, steps=6, every=3, bad=(2,)))
    assert [math.isnan(row.loss) for row in run.steps[:3]] == [False, True, False]


def test_steps_behind_an_end_mean_the_run_went_on(make_run: MakeRun):
    folder = make_run(sweeps=1, steps=4, every=2)
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    step = next(line for line in lines if '"kind":"step"' in line)
    path.write_text("".join(lines) + step)
    assert RunRecord.load(folder).end is None


def test_flops_add_up_over_the_blocks_that_were_active(make_run: MakeRun):
    run = RunRecord.load(make_run(sweeps=1, steps=4, every=4))
    assert run.cost is not None
    first, second, third = run.cost.flops_blocks
    assert run.flops_until(4) == 4 * first
    assert run.flops_until(12) == 4 * (first + second + third)


def test_a_log_that_leaves_steps_out_adds_up_the_same(make_run: MakeRun):
    folder = make_run(sweeps=1, steps=4, every=4)
    whole = RunRecord.load(folder)
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"kind":"step"' not in line or '"step":9,' in line))
    sparse = RunRecord.load(folder)
    assert [row.step for row in sparse.steps] == [9]
    assert [sparse.flops_until(step) for step in range(13)] == [whole.flops_until(step) for step in range(13)]


def test_an_evaluation_between_visits_has_no_block(make_run: MakeRun):
    folder = make_run(sweeps=1, steps=4, every=4)
    with (folder / "events.jsonl").open("a") as log:
        log.write('{"kind":"evaluation","step":12,"tokens":9,"seconds":1.0,"visit":3,"block":null,"loss":2.0}\n')
    assert RunRecord.load(folder).evaluations[-1].block is None


def test_full_training_pays_full_steps(make_run: MakeRun):
    run = RunRecord.load(make_run(method="full", steps=4, every=4))
    assert run.cost is not None
    assert run.flops_until(4) == 4 * run.cost.flops_full


def test_a_folder_without_a_run_says_so(tmp_path: Path, make_run: MakeRun):
    with pytest.raises(DataError, match=r"is .* the folder of a run"):
        RunRecord.load(tmp_path)
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(DataError, match="has no 'run' record"):
        RunRecord.load(tmp_path)


def test_a_record_without_a_needed_field_names_it(make_run: MakeRun):
    folder = make_run(sweeps=1, steps=2, every=2)
    path = folder / "events.jsonl"
    path.write_text(path.read_text().replace('"loss":', '"lost":'))
    with pytest.raises(DataError, match=r"a 'step' record without 'loss'"):
        RunRecord.load(folder)

"""Reading a run folder: what is there, what is torn, what is unknown."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from blocktrain.errors import DataError
from blocktrain.report.run import RunRecord
from blocktrain.train.config import RunConfig
from blocktrain.train.run import run as run_job

MakeRun = Callable[..., Path]


def test_every_kind_of_record_is_read(make_run: MakeRun):
    run = RunRecord.load(make_run(sweeps=2, steps=10, every=5))
    assert run.header.model == "GPT-2"
    assert [block.parameters for block in run.header.blocks] == [500_000, 420_000, 380_000]
    assert (len(run.visits), len(run.visit_ends), len(run.steps), len(run.evaluations)) == (6, 6, 60, 13)
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
    first, second, third = run.cost.flops.blocks
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


def test_what_the_cache_saved_is_taken_off_evenly_and_all_of_it_by_the_visits_end(make_run: MakeRun):
    plain = RunRecord.load(make_run("plain", sweeps=2, steps=4, every=4))
    run = RunRecord.load(make_run("cached", sweeps=2, steps=4, every=4, saved=1_000_001))
    assert [(decision.visit, decision.place) for decision in run.cache_decisions] == [(v, "file") for v in (1, 2, 4, 5)]
    assert [use.step for use in run.cache_uses] == [8, 12, 20, 24]
    cached_steps = [0, 0, 0, 0, 0, *range(1, 9), 8, 8, 8, *range(8, 17)]
    for step, before in enumerate(cached_steps):
        assert run.uncached_flops_until(step) == plain.flops_until(step)
        assert run.flops_until(step) == plain.flops_until(step) - 1_000_001 * before
    assert run.end is not None
    assert run.flops_until(24) == run.end.flops == replace(run, end=None).flops_until(24)


def test_flops_end_where_the_run_says_and_never_fall(make_run: MakeRun):
    run = RunRecord.load(make_run(sweeps=1, steps=4, every=4, saved=1_000_000))
    assert run.end is not None
    # Interrupted in its last visit, whose record then tells only what was saved afterwards.
    later = [run.cache_uses[0], replace(run.cache_uses[1], flops_saved=1_000_000)]
    resumed = replace(run, cache_uses=later)
    curve = [resumed.flops_until(step) for step in range(13)]
    assert curve == sorted(curve)
    assert curve[12] == run.end.flops == replace(resumed, end=None).flops_until(12) - 3_000_000


def test_a_visit_under_way_has_saved_nothing_that_is_known(make_run: MakeRun):
    run = RunRecord.load(make_run(sweeps=1, steps=4, every=4, saved=1_000_000, finish=False))
    assert run.steps_done == 10
    assert run.flops_until(10) == run.uncached_flops_until(10) - 4_000_000
    assert run.cost is not None
    assert [run.mean_step_flops(block) for block in range(3)] == [
        run.cost.flops.blocks[0],
        run.cost.flops.blocks[1] - 1_000_000,
        run.cost.flops.blocks[2],
    ]


def test_a_filling_that_did_not_pay_costs(make_run: MakeRun):
    run = RunRecord.load(make_run(sweeps=1, steps=4, every=4, saved=-500))
    assert run.flops_until(12) == run.uncached_flops_until(12) + 8 * 500


def test_savings_without_costs_are_no_flops(make_run: MakeRun):
    run = RunRecord.load(make_run(sweeps=1, steps=4, every=4, saved=1_000_000, costs=False))
    assert [run.flops_until(step) for step in (6, 12)] == [0, 0]
    assert run.mean_step_flops(1) == 0


def test_a_visit_may_be_cached_nowhere(make_run: MakeRun):
    folder = make_run(sweeps=1, steps=4, every=4, saved=1)
    path = folder / "events.jsonl"
    path.write_text(path.read_text().replace('"place":"file","reason"', '"place":null,"reason"'))
    assert [decision.place for decision in RunRecord.load(folder).cache_decisions] == [None, None]


def test_a_real_run_counts_what_its_records_add_up_to(tiny: Callable[..., RunConfig], tmp_path: Path):
    run_job(
        tiny("prefix.store=host", "sampling.scope=sweep", "sampling.rate=0.05", "schedule.visit=2 epochs"), tmp_path
    )
    run = RunRecord.load(tmp_path)
    assert run.end is not None
    assert [decision.block for decision in run.cache_decisions] == [use.block for use in run.cache_uses] == [1, 2]
    assert all(use.hits == use.rows // 2 for use in run.cache_uses)  # the first of two epochs fills
    assert [use.flops_saved > 0 for use in run.cache_uses] == [False, True]  # below block 1 is only the embedding
    assert replace(run, end=None).flops_until(run.end.steps) == run.end.flops
    assert run.flops_until(run.end.steps) < run.uncached_flops_until(run.end.steps)


def test_an_evaluation_between_visits_has_no_block(make_run: MakeRun):
    folder = make_run(sweeps=1, steps=4, every=4)
    with (folder / "events.jsonl").open("a") as log:
        log.write('{"kind":"evaluation","step":12,"tokens":9,"seconds":1.0,"visit":3,"block":null,"loss":2.0}\n')
    assert RunRecord.load(folder).evaluations[-1].block is None


def test_full_training_pays_full_steps(make_run: MakeRun):
    run = RunRecord.load(make_run(method="full", steps=4, every=4))
    assert run.cost is not None
    assert run.flops_until(4) == 4 * run.cost.flops.full


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
    with pytest.raises(DataError, match=r"cannot be read: a 'evaluation' record without 'loss'"):
        RunRecord.load(folder)


def test_a_field_of_another_type_is_named(make_run: MakeRun):
    folder = make_run(sweeps=1, steps=2, every=2)
    path = folder / "events.jsonl"
    path.write_text(path.read_text().replace('"loss":', '"loss": null, "lost":'))
    with pytest.raises(DataError, match=r"cannot be read: 'loss' must be a number, not null"):
        RunRecord.load(folder)


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "cost", "memory": {"full": 0.5, "blocks": []}}',
        '{"kind": "run", "layout": []}',
        "[" * 3000,
        '{"kind": "retire", "step": ' + "9" * 6000 + "}",
    ],
)
def test_a_damaged_line_is_one_message(make_run: MakeRun, line: str):
    """Such lines ended in tracebacks of Python's own."""
    folder = make_run(sweeps=1, steps=2, every=2)
    path = folder / "events.jsonl"
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(
        DataError, match=r"line \d+ holds a record that cannot be read: .*; restore the file|is not JSON"
    ):
        RunRecord.load(folder)

"""The figures of the table against numbers worked out by hand."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from blocktrain.records.log import EventLog
from blocktrain.records.run_records import CacheUse, VisitEnd
from blocktrain.report.run import RunRecord
from blocktrain.report.summary import summaries_of, summary
from blocktrain.report.summary_table import rows, table

MakeRun = Callable[..., Path]


@pytest.fixture
def by_hand(tmp_path: Path) -> RunRecord:
    """Two blocks, four steps of 100 tokens; every figure is small enough to check in the head."""
    full = {"weights": 200, "master": 400, "gradients": 400, "moments": 800, "activations": 100}
    first = {"weights": 200, "master": 240, "gradients": 240, "moments": 480, "activations": 100}
    second = {"weights": 200, "master": 160, "gradients": 160, "moments": 320, "activations": 50}
    blocks = [{"index": i, "first": "a", "last": "b", "layers": 2, "parameters": 50} for i in range(2)]
    log = EventLog(tmp_path / "events.jsonl")
    log.append({
        "kind": "run", "method": "bcd", "name": "hand", "model": "toy", "parameters": 100, "unit": "tokens",
        "tokens_per_step": 100, "rows_per_step": 1, "blocks": blocks,
    })  # fmt: skip
    log.append({
        "kind": "cost",
        "flops": {"full": 3000, "blocks": [2500, 2000], "theory_full": 1200, "theory_blocks": [960, 720]},
        "memory": {"full": full, "blocks": [first, second]},
    })  # fmt: skip
    for step in range(1, 5):
        block = (step - 1) // 2
        where = {"step": step, "tokens": 100 * step, "seconds": 0.5 * step, "visit": block, "block": block}
        if step % 2 == 1:
            start = {**where, "step": step - 1, "tokens": 100 * (step - 1), "seconds": 0.5 * (step - 1)}
            log.append({"kind": "visit", "sweep": 0, **start})
        log.append({"kind": "step", **where, "loss": 5.0 - step})
    where = {"step": 4, "tokens": 400, "seconds": 2.0, "visit": 1, "block": 1}
    log.append({"kind": "evaluation", **where, "loss": 6.0, "loss_per_byte": 1.5, "accuracy": None})
    log.append({
        "kind": "end", "reason": "finished", "steps": 4, "tokens": 400, "sweeps": 1, "seconds": 2.0, "loss": 6.0,
        "loss_per_byte": 1.5, "accuracy": None, "optimizer_bytes": 484, "flops": 9000, "peak_memory_bytes": 5000,
    })  # fmt: skip
    log.close()
    return RunRecord.load(tmp_path)


@pytest.fixture
def cached_by_hand(by_hand: RunRecord) -> RunRecord:
    """The same, its second visit cached; that saves 800 of the 4000 FLOPs of the visit's two steps."""
    assert by_hand.end is not None
    where = {"tokens": 400, "seconds": 2.0, "visit": 1, "block": 1, "step": 4}
    use = CacheUse(
        **where, place="host", dtype="int8", bytes=2048, rows=8, hits=6, computed=2, stale=3, damaged=1,
        fill_seconds=0.25, wait_seconds=0.5, encoding_error=0.0071, flops_saved=800, seconds_saved=-0.125,
    )  # fmt: skip
    ended = [VisitEnd(**where, reason="done")]
    return replace(by_hand, cache_uses=[use], visit_ends=ended, end=replace(by_hand.end, flops=8200))


def test_summary_equals_the_figures_worked_out_by_hand(by_hand: RunRecord):
    item = summary(by_hand)
    assert item.validation_loss == 6.0
    assert item.validation_loss_per_byte == 1.5
    assert item.flops_mean_step == 2250
    assert item.flops_ratio == 0.75
    assert item.flops_ratio_theory == pytest.approx(0.7)  # (960 + 720) / 2 / 1200
    assert item.flops_excess_percent == pytest.approx(100 * (0.75 / 0.7 - 1))
    assert item.flops == 9000 == by_hand.flops_until(4)
    assert (item.optimizer_bytes, item.optimizer_bytes_full) == (480, 800)
    assert (item.optimizer_bytes_measured, item.peak_memory_bytes) == (484, 5000)
    assert item.memory is not None
    assert item.memory_full is not None
    assert (sum(item.memory.values()), sum(item.memory_full.values())) == (1260, 1900)
    assert item.tokens_per_second == 200
    assert json.loads(json.dumps(item.to_json(), allow_nan=False)) == item.to_json()


def test_table_shows_what_is_saved(by_hand: RunRecord):
    cells = {row.label.strip(): row.cells for row in rows([summary(by_hand)])}
    assert cells["optimizer state, largest block"] == ("480 B", "800 B", "40 %")
    assert cells["memory of a step, largest block"] == ("1.2 KiB", "1.9 KiB", "34 %")  # 1 - 1260 / 1900 = 0.337
    assert cells["of a full step, counted"] == ("0.750", "1.000", "25 %")
    assert cells["of a full step, by the formula"] == ("0.700", "1.000", "30 %")
    assert cells["counted beyond the formula"] == ("7.1 %", "", "")
    assert cells["weights"] == ("200 B", "200 B", "")
    assert cells["validation loss, nats per byte"] == ("1.500", "", "")
    assert "validation accuracy" not in cells


def test_summary_of_a_cached_run_equals_the_figures_worked_out_by_hand(cached_by_hand: RunRecord, by_hand: RunRecord):
    item = summary(cached_by_hand)
    assert (item.flops_mean_step, item.flops_mean_step_uncached) == (2050, 2250)  # (2500 + 2000 - 800 / 2) / 2
    assert item.flops_ratio == pytest.approx(2050 / 3000)
    assert item.flops_ratio_uncached == 0.75
    assert item.flops_excess_percent == summary(by_hand).flops_excess_percent
    assert (item.flops, item.flops_uncached, item.flops_saved) == (8200, 9000, 800)
    assert item.flops_saved_share == pytest.approx(0.8 / 9)
    assert (item.cache_places, item.cache_dtypes) == (["host"], ["int8"])
    assert (item.cache_bytes, item.cache_rows, item.cache_hit_rate) == (2048, 8, 0.75)
    assert (item.cache_stale, item.cache_damaged) == (3, 1)
    assert (item.cache_fill_seconds, item.cache_wait_seconds, item.cache_seconds_saved) == (0.25, 0.5, -0.125)
    assert item.cache_encoding_error == 0.0071
    assert json.loads(json.dumps(item.to_json(), allow_nan=False)) == item.to_json()


def test_table_of_a_cached_run_against_the_uncached_one(cached_by_hand: RunRecord, by_hand: RunRecord):
    cells = {row.label.strip(): row.cells for row in rows([summary(cached_by_hand), summary(by_hand)])}
    assert cells["FLOPs per step, mean of blocks"] == ("2.05 kFLOP", "2.25 kFLOP")
    assert cells["of a full step, counted"] == ("0.683", "0.750")
    assert cells["of a full step, uncached"] == ("0.750", "0.750")
    assert cells["by the formula, uncached"] == ("0.700", "0.700")
    assert cells["beyond the formula, uncached"] == ("7.1 %", "7.1 %")
    assert cells["FLOPs in total"] == ("8.2 kFLOP", "9 kFLOP")
    assert cells["uncached"] == ("9 kFLOP", "–")
    assert cells["saved by the prefix cache"] == ("800 FLOP, 8.9 %", "–")
    assert cells["prefix cache"] == ("host", "–")
    assert cells["stored as"] == ("int8, relative error 0.0071", "–")
    assert cells["stored at most"] == ("2.0 KiB", "–")
    assert cells["rows requested"] == ("8", "–")
    assert cells["found stored"] == ("75 %", "–")
    assert cells["time filling it"] == ("250ms", "–")
    assert cells["time waiting for it"] == ("500ms", "–")
    assert cells["time saved, estimated"] == ("−125ms", "–")


def test_an_uncached_run_has_no_rows_of_a_cache(by_hand: RunRecord):
    item = summary(by_hand)
    figures = item.to_json()
    assert {figures[key] for key in figures if key.startswith(("cache_", "flops_saved"))} == {None}
    labels = " ".join(row.label for row in rows([item]))
    assert "cache" not in labels
    assert "uncached" not in labels


def test_cache_figures_that_are_not_numbers_are_none(cached_by_hand: RunRecord):
    broken = [replace(use, encoding_error=float("nan")) for use in cached_by_hand.cache_uses]
    item = summary(replace(cached_by_hand, cache_uses=[*broken, *cached_by_hand.cache_uses]))
    assert item.cache_encoding_error is None
    json.dumps(item.to_json(), allow_nan=False)


def test_where_a_token_is_a_byte_one_loss_tells_all(by_hand: RunRecord):
    item = summary(by_hand)
    bytewise = replace(item, validation_loss=3.5200, validation_loss_per_byte=3.5203)
    cells = {row.label: row.cells for row in rows([bytewise])}
    assert cells["validation loss, nats per byte"] == ("3.520", "", "")
    assert "validation loss, nats per token" not in cells
    for per_byte in (3.53, None):
        other = replace(bytewise, validation_loss_per_byte=per_byte)
        assert "validation loss, nats per token" in {row.label for row in rows([bytewise, other])}
    assert "validation loss, nats per token" in {row.label for row in rows([bytewise, item])}


def test_the_memory_shown_is_that_of_the_largest_block_where_there_are_blocks(make_run: MakeRun):
    full = summary(RunRecord.load(make_run("full", method="full", steps=5, every=5)))
    bcd = summary(RunRecord.load(make_run(sweeps=1, steps=5, every=5)))
    for chosen, label in (([full], ""), ([bcd], ", largest block"), ([full, bcd], ", largest block")):
        labels = [row.label for row in rows(chosen)]
        at = labels.index(f"memory of a step{label}")
        assert labels[at - 1] == f"optimizer state{label}"
        assert labels[at + 1 : at + 6] == ["  weights", "  master", "  gradients", "  moments", "  activations"]


def test_a_peak_that_was_measured_on_a_gpu_is_compared_and_a_resident_set_is_not(by_hand: RunRecord):
    """In a process with several runs the resident set never falls, whatever the later runs take."""
    cpu = summary(by_hand)
    gpu = replace(cpu, device="cuda")
    resident, measured = "resident set, with PyTorch", "peak memory, measured"
    for chosen, expected in (([cpu], {resident}), ([gpu], {measured}), ([gpu, gpu], {measured}), ([cpu, cpu], set())):
        assert {row.label for row in rows(chosen)} & {resident, measured} == expected


def test_every_row_has_a_cell_for_every_column(make_run: MakeRun):
    records = [RunRecord.load(make_run(sweeps=1, steps=5, every=5, unit="images"))]
    records.append(RunRecord.load(make_run("full", method="full", steps=5, every=5, unit="images", costs=False)))
    records.append(RunRecord.load(make_run("cached", sweeps=1, steps=5, every=5, unit="images", saved=1000)))
    for chosen, columns in ((records[:1], 3), (records[1:2], 1), (records[2:], 3), (records, 3)):
        assert {len(row.cells) for row in rows([summary(run) for run in chosen])} == {columns}


def test_full_run_costs_itself(make_run: MakeRun):
    item = summary(RunRecord.load(make_run(method="full", steps=5, every=5)))
    assert (item.flops_ratio, item.flops_ratio_theory, item.flops_excess_percent) == (1, 1, 0)
    assert item.optimizer_bytes == item.optimizer_bytes_full == 8 * 1_300_000


def test_without_an_end_the_last_evaluation_counts(make_run: MakeRun):
    run = RunRecord.load(make_run(sweeps=1, steps=10, every=4, finish=False))
    item = summary(run)
    assert not item.finished
    assert item.validation_loss == run.evaluations[-1].loss
    assert item.steps == 25
    assert item.flops == run.flops_until(25)


def test_a_loss_that_is_not_a_number_is_none(make_run: MakeRun):
    run = RunRecord.load(make_run(sweeps=1, steps=5, every=5, finish=False, bad=(1, 2)))
    item = summary(replace(run, evaluations=[replace(run.evaluations[-1], loss=float("nan"))]))
    assert item.validation_loss is None
    assert (item.nonfinite_steps, item.skipped_steps) == (2, 2)


def test_terminal_table_is_aligned_and_takes_names_as_they_are(make_run: MakeRun):
    record = RunRecord.load(make_run("[red]bold[/red]", sweeps=1, steps=5, every=5))
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(table([summary(record), summary(record)]))
    lines = [line for line in capture.get().splitlines() if line.strip()]
    assert lines[0].split() == ["[red]bold[/red]", "[red]bold[/red]"]
    assert len({len(line) for line in lines}) == 1


def test_no_runs_no_table():
    with pytest.raises(ValueError, match="at least one run"):
        table([])


def test_runs_of_one_name_are_told_apart(by_hand: RunRecord) -> None:
    assert [item.name for item in summaries_of([by_hand] * 3)] == ["hand", "hand (2)", "hand (3)"]
    assert summaries_of([by_hand]) == [summary(by_hand)]

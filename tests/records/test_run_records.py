"""Records become lines of the log and come back; lines of older logs are read in today's words."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields
from typing import Any

import pytest

from blocktrain.records.codec import Event
from blocktrain.records.log import json_line
from blocktrain.records.run_records import (
    OLD_LAYOUTS,
    RECORDS,
    BlockSummary,
    CacheDecision,
    CacheUse,
    Evaluation,
    GrowingStep,
    MemoryPeaks,
    MicroBatch,
    PeakMemory,
    Record,
    RunEnd,
    RunHeader,
    Sample,
    Step,
    StepCosts,
    StepFlops,
    StepMemory,
    VisitEnd,
    VisitStart,
    from_event,
)

WHERE: dict[str, Any] = {"visit": 3, "block": 1, "step": 40, "tokens": 4000, "seconds": 1.5}
BLOCK = BlockSummary(index=0, first="embedding", last="h.1", layers=3, parameters=50)
PEAK = PeakMemory(parts={"frozen": 10, "moments": 4}, host_bytes=2, operation="aten.mul.Tensor")
EXAMPLES: list[Record] = [
    RunHeader(
        method="bcd", name="a", model="GPT-2", parameters=50, tokens_per_step=100, rows_per_step=4, micro_rows="auto",
        memory={"frozen": "host", "loss_chunk": 8}, blocks=(BLOCK,),
    ),
    StepCosts(
        flops=StepFlops(full=30, blocks=(20, 10), theory_full=30, theory_blocks=(20, 10), forward_layers=(1, 2)),
        memory=StepMemory(full={"moments": 8}, blocks=({"moments": 4}, {"moments": 2})),
        growing=(GrowingStep(block=1, left_out=2, flops=5),),
    ),
    MemoryPeaks(blocks=(PEAK, PEAK), full=PEAK),
    MicroBatch(micro_rows=4, reason="4 of 16 rows fit", failed=(16, 8)),
    VisitStart(**WHERE, sweep=1, left_out=2, step_flops=5),
    CacheDecision(**WHERE, place=None, reason="cannot pay", level=2),
    Step(**WHERE, sweep=1, loss=2.5, lr=1e-3, grad_norm=0.5, skipped=True),
    Evaluation(**{**WHERE, "block": None}, loss=2.5, loss_per_byte=1.25, accuracy=0.5, exact_match=0.25),
    Sample(step=40, prompt="2 + 2", text="5", expected="4", correct=False),
    CacheUse(
        **WHERE, place="file", dtype="bf16", bytes=10, rows=8, hits=6, computed=2, flops_saved=-5, fill_seconds=0.25,
        wait_seconds=0.5, seconds_saved=-1.0,
    ),
    VisitEnd(**WHERE, reason="40 steps done", peak_memory_bytes=100),
    RunEnd(reason="1 sweep done", steps=40, tokens=4000, sweeps=1, seconds=2.0, loss=2.5, flops=900),
]  # fmt: skip


def line(record: Record) -> Event:
    """The record as a reader of the log gets it."""
    return json.loads(json_line(record.to_event()))


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: record.kind)
def test_a_record_comes_back_as_it_was_written(record: Record) -> None:
    assert line(record)["kind"] == record.kind
    assert from_event(line(record)) == record


def test_there_is_an_example_of_every_kind() -> None:
    assert [record.kind for record in EXAMPLES] == list(RECORDS)


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: record.kind)
def test_a_log_without_the_newer_fields_is_read(record: Record) -> None:
    """Fields that have a default came later, or may come later."""
    newer = {item.name for item in fields(record) if item.default is not MISSING or item.default_factory is not MISSING}
    older = {key: value for key, value in line(record).items() if key not in newer}
    found = from_event(older)
    assert type(found) is type(record)
    for item in fields(record):
        if item.name not in newer:
            assert getattr(found, item.name) == getattr(record, item.name)


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: record.kind)
def test_a_missing_field_is_named(record: Record) -> None:
    needed = next(item.name for item in fields(record) if item.default is MISSING and item.default_factory is MISSING)
    event = line(record)
    del event[needed]
    with pytest.raises((ValueError, KeyError), match=rf"'{record.kind}' record without '{needed}'|^'{needed}'$"):
        from_event(event)


def test_unknown_fields_and_kinds_are_ignored() -> None:
    step = EXAMPLES[6]
    assert from_event({**line(step), "colour": "red"}) == step
    assert from_event({"kind": "poem", "lines": 3}) is None


def test_a_field_that_is_optional_is_written_only_where_it_differs_from_its_default() -> None:
    assert "left_out" not in VisitStart(**WHERE, sweep=0).to_event()
    assert VisitStart(**WHERE, sweep=0, left_out=1).to_event()["left_out"] == 1


def test_numbers_that_json_does_not_have_come_back() -> None:
    found = from_event(line(Step(**WHERE, loss=math.nan, grad_norm=math.inf)))
    assert isinstance(found, Step)
    assert math.isnan(found.loss)
    assert found.grad_norm == math.inf


def test_older_logs_called_the_moments_of_a_cost_record_optimizer() -> None:
    costs = line(EXAMPLES[1])
    older = json.loads(json.dumps(costs).replace('"moments"', '"optimizer"'))
    assert older != costs
    assert from_event(older) == EXAMPLES[1]
    assert "optimizer" in older["memory"]["full"]  # the line itself is not changed


@pytest.mark.parametrize(("older", "layout"), OLD_LAYOUTS.items())
def test_older_logs_have_other_names_for_the_layouts(older: str, layout: str) -> None:
    found = from_event({**line(EXAMPLES[0]), "layout": older})
    assert isinstance(found, RunHeader)
    assert found.layout == layout

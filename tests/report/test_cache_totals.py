"""The cache's records added up, against sums in the head."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from blocktrain.records.run_records import CacheDecision
from blocktrain.report.cache_totals import abandoned, by_block, reasons, totals
from blocktrain.report.run import RunRecord

MakeRun = Callable[..., Path]


@pytest.fixture
def record(make_run: MakeRun) -> RunRecord:
    """Two sweeps over three blocks, the upper two cached, 1000 FLOPs saved a step."""
    return RunRecord.load(make_run(sweeps=2, steps=4, every=4, saved=1000))


def decisions(*pairs: tuple[str | None, str]) -> list[CacheDecision]:
    return [
        CacheDecision(visit=visit, block=1, level=1, step=0, tokens=0, seconds=0.0, place=place, reason=reason)
        for visit, (place, reason) in enumerate(pairs)
    ]


def test_totals_are_sums_but_for_what_is_held_at_once(record: RunRecord):
    did = totals(record.cache_uses)
    assert (did.visits, did.places, did.dtypes) == (4, ("file",), ("bf16",))
    assert did.bytes == 2 * 2**20 + 2
    assert (did.rows, did.hits, did.hit_rate) == (384, 256, 2 / 3)
    assert (did.fill_seconds, did.wait_seconds, did.seconds_saved) == (1.0, 0.25, 6.0)
    assert did.flops_saved == 16_000
    assert did.encoding_error == 0.002


def test_each_block_has_its_own_totals(record: RunRecord):
    first, second = record.cache_uses[:2]
    found = by_block(
        [*record.cache_uses[::-1], replace(first, visit=9, place="host", dtype="int8", stale=3, damaged=1)]
    )
    assert list(found) == [1, 2]
    assert found[2] == replace(
        totals([second]), visits=2, rows=192, hits=128, fill_seconds=0.5, wait_seconds=0.125, seconds_saved=3.0,
        flops_saved=8000,
    )  # fmt: skip
    assert (found[1].visits, found[1].places, found[1].dtypes) == (3, ("file", "host"), ("bf16", "int8"))
    assert (found[1].stale, found[1].damaged, found[1].flops_saved) == (3, 1, 12_000)


def test_no_rows_asked_for_is_no_rate(record: RunRecord):
    assert totals([replace(record.cache_uses[0], rows=0, hits=0)]).hit_rate is None


def test_an_error_that_is_not_a_number_is_not_hidden_by_others(record: RunRecord):
    first, second = record.cache_uses[:2]
    assert math.isnan(totals([first, replace(second, encoding_error=math.nan), first]).encoding_error)


def test_reasons_that_differ_only_in_measured_figures_are_one():
    said = reasons(
        decisions(
            ("host", "host: 0.0291 s instead of 0.109 s"),
            (None, "cannot pay"),
            ("host", "host: 1.4e-05 s instead of 12 s"),
            (None, "cannot pay"),
            ("file", "cannot pay"),
        )
    )
    assert [(reason.place, reason.text, reason.visits, reason.figures_differ) for reason in said] == [
        ("host", "host: 0.0291 s instead of 0.109 s", 2, True),
        (None, "cannot pay", 2, False),
        ("file", "cannot pay", 1, False),
    ]


def test_a_cache_that_is_abandoned_half_way_leaves_no_record(record: RunRecord):
    assert abandoned(record) == 0
    assert abandoned(replace(record, cache_uses=record.cache_uses[1:])) == 1
    # A visit under way has no record yet either, and one that never had a cache has nothing to give up.
    assert abandoned(replace(record, cache_uses=record.cache_uses[:3], visit_ends=record.visit_ends[:5])) == 0
    nowhere = [replace(decision, place=None) for decision in record.cache_decisions]
    assert abandoned(replace(record, cache_decisions=nowhere, cache_uses=[])) == 0

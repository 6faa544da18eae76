"""What the model wrote, in the report: before and after, and never as markup."""

from __future__ import annotations

from pathlib import Path

from blocktrain.records.log import EventLog
from blocktrain.report.page import page
from blocktrain.report.run import RunRecord
from blocktrain.report.summary import summary


def add_samples(folder: Path) -> None:
    log = EventLog(folder / "events.jsonl")
    for step in (0, 50, 100):
        for prompt in range(3):
            correct = step == 100 and prompt > 0
            written = "7" if correct else "<script>alert(1)</script>"
            sample = {"prompt": f"<b>{prompt}</b>", "text": written, "expected": "7", "correct": correct}
            log.append({"kind": "sample", "step": step, **sample})
    log.append({"kind": "evaluation", "step": 100, "tokens": 1, "seconds": 1, "visit": 0, "block": 0, "loss": 1,
                "exact_match": 2 / 3})  # fmt: skip
    log.close()


def test_first_and_last_answers_are_shown_escaped(make_run):
    folder = make_run(sweeps=1, steps=40, finish=False)
    add_samples(folder)
    record = RunRecord.load(folder)
    text = page([record])
    assert "What the model writes" in text
    assert "Exact match: 0 % after step 0, 67 % after step 100." in text
    assert "<script>alert" not in text
    assert "<b>0" not in text
    assert text.count("&lt;b&gt;") == 3
    assert "after step 100 (correct)" in text
    assert "<dt>after step 50" not in text
    assert summary(record).exact_match == 2 / 3
    assert ", exact match 67 %" in text
    assert '<th scope="col">exact match</th>' in text


def test_measures_that_a_run_has_not_have_no_column(make_run):
    text = page([RunRecord.load(make_run())])
    assert '<th scope="col">loss per byte</th>' in text
    assert "exact match" not in text
    assert '<th scope="col">accuracy</th>' not in text


def test_a_run_that_was_asked_nothing_has_no_such_section(make_run):
    assert "What the model writes" not in page([RunRecord.load(make_run(sweeps=1, steps=4))])

"""The section on tracked memory: every figure of the log in its cell, and nothing where the log has none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blocktrain.report.page import page
from blocktrain.report.run import RunRecord
from blocktrain.report.sections.tracked_memory import TRACKED_MEMORY

MIB = 2**20
PEAK: dict[str, Any] = {
    "parts": {"frozen": 8 * MIB, "activations": 4 * MIB, "moments": 2 * MIB, "inputs": MIB},
    "host_bytes": 3 * MIB,
    "operation": "aten.isnan.default",
}


def with_memory(folder: Path) -> RunRecord:
    """The run with a `memory` and a `micro_batch` record, and a measured peak in each retirement."""
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["kind"] == "retire":
            event["peak_memory_bytes"] = (100 + event["block"]) * MIB
    events += [{"kind": "memory", "full": {"parts": {"active": 50 * MIB}}, "blocks": [PEAK] * 3}]
    events += [{"kind": "micro_batch", "micro_rows": 4, "reason": "4 of 16 rows need <little>", "failed": []}]
    path.write_text("\n".join(json.dumps(event) for event in events) + "\n")
    return RunRecord.load(folder)


def cells(markup: str, label: str) -> list[str]:
    row = re.search(rf'<th scope="row">{label}</th>(.*)</tr>', markup)
    assert row is not None
    return re.findall(r"<td>(.*?)</td>", row.group(1))


def test_each_block_has_its_parts_and_what_was_measured(make_run: Callable[..., Path]) -> None:
    markup = TRACKED_MEMORY.markup(with_memory(make_run()))
    found = cells(markup, "block 1")
    headings = re.findall(r'<th scope="col">(.*?)</th>', markup)
    assert dict(zip(headings, found, strict=True)) == {
        "peak": "15.0 MiB",
        "measured": "101.0 MiB",
        "frozen": "8.0 MiB",
        "active": "–",
        "moments": "2.0 MiB",
        "activations": "4.0 MiB",
        "other": "1.0 MiB",
        "on the host": "3.0 MiB",
        "worst at": "isnan",
    }  # master, gradients, logits and cache are in no row, and so in no column
    assert cells(markup, "full training")[:4] == ["50.0 MiB", "–", "–", "50.0 MiB"]
    assert "4 of 16 rows need &lt;little&gt;" in markup


def test_it_is_on_the_page_and_absent_from_older_logs(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    assert TRACKED_MEMORY.markup(RunRecord.load(folder)) == ""
    assert "Memory by part, tracked" not in page([RunRecord.load(folder)])
    assert "Memory by part, tracked" in page([with_memory(folder)])

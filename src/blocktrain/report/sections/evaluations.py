"""Every evaluation in a table, with the measures that the log has."""

from __future__ import annotations

from collections.abc import Callable

from blocktrain.records.run_records import Evaluation
from blocktrain.report.format import ABSENT, decimal
from blocktrain.report.run import RunRecord
from blocktrain.report.section import Section, table
from blocktrain.report.series import evenly
from blocktrain.units import format_count, format_seconds

MOST_ROWS = 200
MEASURES: dict[str, Callable[[Evaluation], float | None]] = {
    "loss per byte": lambda row: row.loss_per_byte,
    "accuracy": lambda row: row.accuracy,
    "exact match": lambda row: row.exact_match,
}


def _html(run: RunRecord) -> str:
    unit = run.header.unit
    known = {text: read for text, read in MEASURES.items() if any(read(row) is not None for row in run.evaluations)}
    rows = []
    for row in (run.evaluations[index] for index in evenly(len(run.evaluations), MOST_ROWS)):
        cells = [f"{row.step:,}", format_count(row.tokens), format_seconds(row.seconds)]
        cells += [ABSENT if row.block is None else str(row.block), decimal(row.loss, 4)]
        rows.append([*cells, *(decimal(read(row), 4) for read in known.values())])
    return table(("step", unit, "time", "block", f"loss per {unit.removesuffix('s')}", *known), rows)


EVALUATIONS = Section(
    title="Every evaluation",
    html=_html,
    condition=lambda run: bool(run.evaluations),
    form="folded",
    in_comparison=True,
)

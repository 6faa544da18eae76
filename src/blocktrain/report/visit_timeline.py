"""The visits of a run as a timeline: which block was active, and why each visit ended."""

from __future__ import annotations

from blocktrain.records.run_records import VisitStart
from blocktrain.report.axis import Axis
from blocktrain.report.chart import Stretch, timeline
from blocktrain.report.figure import block_colour
from blocktrain.report.run import RunRecord
from blocktrain.units import format_count, format_seconds

MOST_TITLES = 400  # more visits than this are drawn without a text for each


def visit_timeline(run: RunRecord, x: Axis) -> str:
    """A row for each block, a stretch for each visit, along the tokens of `x`."""
    ended = {row.visit: row for row in run.visit_ends}
    following = {before.visit: after for before, after in zip(run.visits, run.visits[1:], strict=False)}
    stretches = []
    for visit in run.visits:
        end = ended.get(visit.visit) or following.get(visit.visit)
        stretches.append(
            Stretch(
                row=visit.block,
                start=visit.tokens,
                stop=end.tokens if end else max(run.tokens, visit.tokens),
                title="" if len(run.visits) > MOST_TITLES else _title(run, visit),
                colour=block_colour(run, visit.block) + ("" if visit.visit in ended else " open"),
            )
        )
    many = len(run.header.blocks) > 8
    names = ["" if many and block.index % 2 else str(block.index) for block in run.header.blocks]
    drawn = timeline(x, names, stretches, label="visits", row_height=10 if many else 20)
    return f'<p class="axis-name">active block</p>{drawn}'


def _title(run: RunRecord, visit: VisitStart) -> str:
    text = f"visit {visit.visit}, sweep {visit.sweep}, block {visit.block}: from {format_count(visit.tokens)}"
    for row in run.visit_ends:
        if row.visit == visit.visit:
            took = format_seconds(row.seconds - visit.seconds)
            return f"{text} to {format_count(row.tokens)} {run.header.unit}, {took}; retired: {row.reason}"
    return f"{text} {run.header.unit}; not retired"

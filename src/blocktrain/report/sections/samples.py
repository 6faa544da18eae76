"""What the model writes: its answers to the same validation prompts before training and at the end."""

from __future__ import annotations

from html import escape

from blocktrain.records.run_records import Sample
from blocktrain.report.format import percent, plural
from blocktrain.report.run import RunRecord
from blocktrain.report.section import Section

MOST_PROMPTS = 5


def _first_and_last(run: RunRecord) -> tuple[list[Sample], list[Sample]]:
    """The answers of the first and of the last evaluation, which may be the same one."""
    first, last = ([row for row in run.samples if row.step == run.samples[end].step] for end in (0, -1))
    return first, last


def _note(run: RunRecord) -> str:
    first, last = _first_and_last(run)
    matches = ", ".join(
        f"{percent(sum(row.correct for row in rows) / len(rows))} after step {rows[0].step:,}"
        for rows in ([first, last] if first[0].step != last[0].step else [last])
    )
    return f"greedy answers to {plural(len(last), 'validation prompt')}. Exact match: {matches}."


def _html(run: RunRecord) -> str:
    """Prompts and their answers; all of it is text that a model or a stranger wrote, so it is escaped."""
    html = ""
    for first, last in list(zip(*_first_and_last(run), strict=False))[:MOST_PROMPTS]:
        rows = [("prompt", last.prompt), ("expected", last.expected)]
        for row in [first, last] if first.step != last.step else [last]:
            rows.append((f"after step {row.step:,}" + (" (correct)" if row.correct else ""), row.text))
        body = "".join(f"<dt>{escape(heading)}</dt><dd><pre>{escape(text)}</pre></dd>" for heading, text in rows)
        html += f'<dl class="sample">{body}</dl>\n'
    return html


SAMPLES = Section(
    title="What the model writes",
    note=_note,
    html=_html,
    condition=lambda run: bool(run.samples),
    in_comparison=True,
)

"""The page's section on what the model writes: the same prompts before training and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from blocktrain.report.figures import figure
from blocktrain.report.format import percent, plural
from blocktrain.report.records import Sample
from blocktrain.report.run import RunRecord

MOST_PROMPTS = 5


def section(run: RunRecord, name: str) -> str:
    """The section, `name` in its title where there are several runs; nothing where the model was asked nothing."""
    if not run.samples:
        return ""
    first, last = ([row for row in run.samples if row.step == run.samples[end].step] for end in (0, -1))
    title = "What it writes" + (f" of {name}" if name else "")
    note = f"greedy answers to {plural(len(last), 'validation prompt')}. Exact match: "
    shown = [first, last] if first[0].step != last[0].step else [last]
    note += ", ".join(f"{percent(_right(rows))} after step {rows[0].step:,}" for rows in shown) + "."
    return figure(title, note, "".join(_prompt(*pair) for pair in list(zip(first, last, strict=False))[:MOST_PROMPTS]))


def _right(samples: Sequence[Sample]) -> float:
    return sum(row.correct for row in samples) / len(samples)


def _prompt(first: Sample, last: Sample) -> str:
    """All of it is text that a model or a stranger wrote: escaped."""
    rows = [("prompt", last.prompt), ("expected", last.expected)]
    rows += [(_heading(row), row.text) for row in ([first, last] if first.step != last.step else [last])]
    body = "".join(f"<dt>{escape(heading)}</dt><dd><pre>{escape(text)}</pre></dd>" for heading, text in rows)
    return f'<dl class="sample">{body}</dl>\n'


def _heading(row: Sample) -> str:
    return f"after step {row.step:,}" + (" (right)" if row.correct else "")

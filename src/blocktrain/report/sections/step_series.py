"""One quantity of every step over tokens: the learning rate, the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable

from blocktrain.records.run_records import Step
from blocktrain.report.axis import count_axis, padded, typical_range
from blocktrain.report.chart import Track, line_chart, values
from blocktrain.report.format import format_small
from blocktrain.report.run import RunRecord
from blocktrain.report.section import Section, block_colour, plot
from blocktrain.report.sections.loss import coloured_lines
from blocktrain.report.series import evenly, thin


def _series(title: str, note: str, read: Callable[[Step], float], name: str) -> Section:
    """The section of one quantity, which a log has that has at least two values of it."""

    def html(run: RunRecord) -> str:
        series = [read(row) for row in run.steps]
        x = count_axis(f"training {run.header.unit}", run.tokens)
        y = padded(title, [value for value in [*typical_range(series), 0.0] if math.isfinite(value)], count=3)
        lines = coloured_lines(run, thin(series, 400), series, lambda row: row.tokens, "fine")
        rows = []
        for index in evenly(len(series), 300):
            row, value = run.steps[index], series[index]
            rows.append((row.tokens, value, block_colour(run, row.block), [f"{row.step:,}", format_small(value)]))
        data = values([Track(columns=["step", title.lower()], rows=rows)], x, y, name)
        return plot(line_chart(x, y, lines, label=title, height=110), name, data)

    return Section(
        title=title,
        note=lambda run: note.format(unit=run.header.unit),
        html=html,
        condition=lambda run: sum(math.isfinite(read(row)) for row in run.steps) >= 2,
    )


LEARNING_RATE = _series("Learning rate", "by training {unit}.", lambda row: row.lr, "lr")
GRADIENT_NORM = _series(
    "Gradient norm", "of the active block before clipping, by training {unit}.", lambda row: row.grad_norm, "norm"
)

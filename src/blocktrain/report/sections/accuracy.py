"""Validation accuracy over tokens, for models that have one."""

from __future__ import annotations

import math

from blocktrain.records.run_records import Evaluation
from blocktrain.report.axis import count_axis, padded
from blocktrain.report.chart import Dot, Line, Track, line_chart, values
from blocktrain.report.run import RunRecord
from blocktrain.report.section import MOST_DOTS, Section, block_colour, plot


def _measured(run: RunRecord) -> list[tuple[Evaluation, float]]:
    """The evaluations that have an accuracy, and that in percent."""
    known = [(row, row.accuracy) for row in run.evaluations if row.accuracy is not None]
    return [(row, 100 * accuracy) for row, accuracy in known if math.isfinite(accuracy)]


def _html(run: RunRecord) -> str:
    rows = _measured(run)
    x = count_axis(f"training {run.header.unit}", run.tokens)
    y = padded("accuracy", [percent for _, percent in rows])
    dots = [
        Dot(
            x=row.tokens,
            y=percent,
            title=f"{percent:.2f} % after step {row.step:,}",
            colour="ring" if row.block is None else block_colour(run, row.block),
        )
        for row, percent in rows
    ]
    line = Line(points=[(row.tokens, percent) for row, percent in rows], kind="validation")
    chart = line_chart(x, y, [line], dots if len(dots) <= MOST_DOTS else (), label="accuracy", height=200)
    track = Track(
        columns=["accuracy", "after step"],
        rows=[(row.tokens, percent, "ring", [f"{percent:.2f} %", f"{row.step:,}"]) for row, percent in rows],
    )
    return plot(chart, "accuracy", values([track], x, y, "accuracy"))


ACCURACY = Section(
    title="Validation accuracy", note=lambda run: "percent.", html=_html, condition=lambda run: bool(_measured(run))
)

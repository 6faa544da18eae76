"""Several runs on one page: validation losses over tokens, counted FLOPs and wall time, in one colour for each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from blocktrain.errors import DataError
from blocktrain.records.run_records import Evaluation
from blocktrain.report.axis import Axis, count_axis, flops_axis, time_axis, without_start
from blocktrain.report.chart import Dot, Line, Track, line_chart, values
from blocktrain.report.format import decimal, flops_text
from blocktrain.report.memory_parts import memory_bars
from blocktrain.report.multiplier import loss_of
from blocktrain.report.run import RunRecord
from blocktrain.report.section import MOST_DOTS, figure, plot
from blocktrain.report.series import thin
from blocktrain.report.summary import summary
from blocktrain.units import format_count, format_seconds

XOf = Callable[[RunRecord, Evaluation], float]  # where an evaluation of a run lies on the x axis


def figures(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Validation losses over tokens, FLOPs and time, and the memory of a step.

    Raises `DataError` unless the runs count the same thing: tokens, texts or images.
    """
    first, unit = runs[0], runs[0].header.unit
    for run in runs[1:]:
        if run.header.unit != unit:
            raise DataError(
                f"'{first.folder}' counts {unit} and '{run.folder}' {run.header.unit}; "
                "compare runs on the same kind of data"
            )
    _, read = loss_of(runs)
    losses = [(row.tokens, read(row)) for run in runs for row in run.evaluations]
    y = without_start("validation loss", losses, min(run.tokens for run in runs))
    tokens = count_axis(f"training {unit}", max(run.tokens for run in runs))
    html = _losses(runs, names, y, tokens, lambda _, row: row.tokens, words=f"training {unit}", name="tokens")
    if all(run.cost for run in runs):
        work = flops_axis("counted FLOPs", max(run.flops_until(run.steps_done) for run in runs))
        html += _losses(
            runs, names, y, work, lambda run, row: run.flops_until(row.step), words="counted FLOPs", name="flops"
        )
    time, second = time_axis(max(run.seconds for run in runs))
    html += _losses(runs, names, y, time, lambda _, row: row.seconds / second, words="wall time", name="time")
    known = [(name, summary(run).memory) for name, run in zip(names, runs, strict=True)]
    memories = [(name if len(name) <= 24 else name[:23] + "…", memory) for name, memory in known if memory]
    if memories:
        bars = memory_bars(memories, css="named")
        html += figure("Memory of a step", "bytes by part, with the largest block active.", bars)
    return html


def _losses(
    runs: Sequence[RunRecord], names: Sequence[str], y: Axis, x: Axis, x_of: XOf, *, words: str, name: str
) -> str:
    """Validation losses over `x`, an axis that is called `words` on the page and `name` in ids."""
    unit, read = loss_of(runs)
    start = max((read(run.evaluations[0]) for run in runs if run.evaluations), default=0.0)
    above = f" The start, at {start:.2f}, is above the frame." if start > y.high and name == "tokens" else ""
    lines, dots, tracks = [], [], []
    for index, run in enumerate(runs):
        shown = [run.evaluations[at] for at in thin([read(row) for row in run.evaluations], 300)]
        points = [(x_of(run, row), read(row)) for row in shown]
        texts = []
        for row in shown:
            work = flops_text(run.flops_until(row.step))
            texts.append([decimal(read(row)), format_count(row.tokens), work, format_seconds(row.seconds)])
        lines.append(Line(points=points, colour=f"k{index}"))
        if len(points) <= MOST_DOTS:
            dots += [
                Dot(x=px, y=py, title=f"{names[index]}: " + ", ".join(text), colour=f"k{index}")
                for (px, py), text in zip(points, texts, strict=True)
            ]
        rows = [
            (px, py, f"k{index}", text if len(runs) <= 3 else text[:1])
            for (px, py), text in zip(points, texts, strict=True)
        ]
        headings = [names[index], run.header.unit, "FLOPs", "time"]
        tracks.append(Track(columns=headings if len(runs) <= 3 else headings[:1], rows=rows))
    chart = line_chart(x, y, lines, dots, label=f"validation loss by {words}", height=300)
    drawn = plot(chart, f"loss-{name}", values(tracks, x, y, f"loss-{name}"))
    items = "".join(
        f'<li><i class="swatch k{index}"></i>{escape(names[index])} '
        f"<span>{decimal(read(run.evaluations[-1])) if run.evaluations else ''}</span></li>"
        for index, run in enumerate(runs)
    )
    return figure(f"Validation loss by {words}", f"{unit}.{above}", f'<ul class="key">{items}</ul>', drawn)

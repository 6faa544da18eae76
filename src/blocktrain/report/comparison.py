"""Several runs on one page: the same losses over tokens, counted FLOPs and wall time, one colour a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from blocktrain.errors import DataError
from blocktrain.report.chart import Bar, Dot, Line, Track, line_chart, stacked_bars, values
from blocktrain.report.figures import MOST_DOTS, figure, part_colour, parts_key, plot, without_start
from blocktrain.report.format import Axis, count_axis, decimal, flops_axis, flops_text, time_axis
from blocktrain.report.multiplier import loss_of
from blocktrain.report.records import Evaluation
from blocktrain.report.run import RunRecord
from blocktrain.report.series import thin
from blocktrain.report.summary import Summary, parts, summary
from blocktrain.units import format_bytes, format_count, format_seconds


def comparable(runs: Sequence[RunRecord]) -> None:
    """Raise `DataError` where the runs count different things."""
    first = runs[0]
    for run in runs[1:]:
        if run.header.unit != first.header.unit:
            raise DataError(
                f"'{first.folder}' counts {first.header.unit} and '{run.folder}' {run.header.unit}; "
                f"compare runs on the same kind of data"
            )


@dataclass(frozen=True, kw_only=True)
class Over:
    """What a figure draws the losses over: an axis, its name in words and in ids, and where an evaluation lies."""

    axis: Axis
    words: str
    name: str
    place: Callable[[RunRecord, Evaluation], float]


def figures(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Validation losses over tokens, FLOPs and time, one colour a run."""
    unit = runs[0].header.unit
    time, second = time_axis(max(run.seconds for run in runs))
    work = max(run.flops_until(run.steps_done) for run in runs)
    tokens = count_axis(f"training {unit}", max(run.tokens for run in runs))
    seen = [
        Over(axis=tokens, words=f"training {unit}", name="tokens", place=lambda _, row: row.tokens),
        Over(
            axis=flops_axis("counted FLOPs", work),
            words="counted FLOPs",
            name="flops",
            place=lambda run, row: run.flops_until(row.step),
        ),
        Over(axis=time, words="wall time", name="time", place=lambda _, row: row.seconds / second),
    ]
    if not all(run.cost for run in runs):
        seen.pop(1)
    y = _loss_axis(runs)
    return "".join(_losses(runs, names, y, over) for over in seen) + memory(runs, names)


def _loss_axis(runs: Sequence[RunRecord]) -> Axis:
    _, read = loss_of(runs)
    points = [(row.tokens, read(row)) for run in runs for row in run.evaluations]
    return without_start("validation loss", points, min(run.tokens for run in runs))


def _losses(runs: Sequence[RunRecord], names: Sequence[str], y: Axis, over: Over) -> str:
    unit, read = loss_of(runs)
    start = max((read(run.evaluations[0]) for run in runs if run.evaluations), default=0.0)
    above = f" The start, at {start:.2f}, is above the frame." if start > y.high and over.name == "tokens" else ""
    lines, dots, tracks = [], [], []
    for index, run in enumerate(runs):
        shown = [run.evaluations[at] for at in thin([read(row) for row in run.evaluations], 300)]
        points = [(over.place(run, row), read(row)) for row in shown]
        texts = [_texts(run, row, read(row)) for row in shown]
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
    chart = line_chart(over.axis, y, lines, dots, label=f"validation loss by {over.words}", height=300)
    name = f"loss-{over.name}"
    drawn = plot(chart, name, values(tracks, over.axis, y, name))
    return figure(f"Validation loss by {over.words}", f"{unit}.{above}", runs_key(runs, names), drawn)


def _texts(run: RunRecord, row: Evaluation, loss: float) -> list[str]:
    work = flops_text(run.flops_until(row.step))
    return [decimal(loss), format_count(row.tokens), work, format_seconds(row.seconds)]


def runs_key(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Which colour is which run, with its last loss."""
    _, read = loss_of(runs)
    items = "".join(
        f'<li><i class="swatch k{index}"></i>{escape(names[index])} '
        f"<span>{decimal(read(run.evaluations[-1])) if run.evaluations else ''}</span></li>"
        for index, run in enumerate(runs)
    )
    return f'<ul class="key">{items}</ul>'


def memory(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Bytes of a step by part: of each run's largest block."""
    listed: list[tuple[str, Summary]] = [
        (name, item) for name, item in zip(names, map(summary, runs), strict=True) if item["memory"]
    ]
    if not listed:
        return ""
    found = parts(*(item["memory"] for _, item in listed))
    limit = max(sum(item["memory"].values()) for _, item in listed) or 1
    bars = [
        Bar(
            label=name if len(name) <= 24 else name[:23] + "…",
            pieces=[
                (item["memory"].get(part, 0), part_colour(part), f"{part}: {format_bytes(item['memory'].get(part, 0))}")
                for part in found
            ],
            text=format_bytes(sum(item["memory"].values())),
        )
        for name, item in listed
    ]
    chart = stacked_bars(bars, limit, label="memory of a step by part")
    note = "bytes by part, with the largest block active."
    return figure("Memory of a step", note, parts_key(found), f'<div class="bars named">{chart}</div>')

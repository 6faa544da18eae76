"""Several runs on one page: validation losses over tokens, counted FLOPs and wall time, in one colour for each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def require_comparable(runs: Sequence[RunRecord]) -> None:
    """Raises `DataError` unless the runs count the same thing: tokens, texts or images."""
    first = runs[0]
    for run in runs[1:]:
        if run.header.unit != first.header.unit:
            raise DataError(
                f"'{first.folder}' counts {first.header.unit} and '{run.folder}' {run.header.unit}; "
                f"compare runs on the same kind of data"
            )


@dataclass(frozen=True, kw_only=True)
class LossesOver:
    """What a figure draws the losses over: the x axis, its name in words and in ids, and where an evaluation lies."""

    axis: Axis
    words: str
    name: str
    x_of: Callable[[RunRecord, Evaluation], float]


def figures(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Validation losses over tokens, FLOPs and time, and the memory of a step."""
    unit = runs[0].header.unit
    time, second = time_axis(max(run.seconds for run in runs))
    work = max(run.flops_until(run.steps_done) for run in runs)
    tokens = count_axis(f"training {unit}", max(run.tokens for run in runs))
    axes = [
        LossesOver(axis=tokens, words=f"training {unit}", name="tokens", x_of=lambda _, row: row.tokens),
        LossesOver(
            axis=flops_axis("counted FLOPs", work),
            words="counted FLOPs",
            name="flops",
            x_of=lambda run, row: run.flops_until(row.step),
        ),
        LossesOver(axis=time, words="wall time", name="time", x_of=lambda _, row: row.seconds / second),
    ]
    if not all(run.cost for run in runs):
        axes.pop(1)
    y = _loss_axis(runs)
    return "".join(_losses(runs, names, y, over) for over in axes) + _memory(runs, names)


def _loss_axis(runs: Sequence[RunRecord]) -> Axis:
    _, read = loss_of(runs)
    points = [(row.tokens, read(row)) for run in runs for row in run.evaluations]
    return without_start("validation loss", points, min(run.tokens for run in runs))


def _losses(runs: Sequence[RunRecord], names: Sequence[str], y: Axis, over: LossesOver) -> str:
    unit, read = loss_of(runs)
    start = max((read(run.evaluations[0]) for run in runs if run.evaluations), default=0.0)
    above = f" The start, at {start:.2f}, is above the frame." if start > y.high and over.name == "tokens" else ""
    lines, dots, tracks = [], [], []
    for index, run in enumerate(runs):
        shown = [run.evaluations[at] for at in thin([read(row) for row in run.evaluations], 300)]
        points = [(over.x_of(run, row), read(row)) for row in shown]
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
    return figure(f"Validation loss by {over.words}", f"{unit}.{above}", _runs_key(runs, names), drawn)


def _texts(run: RunRecord, row: Evaluation, loss: float) -> list[str]:
    work = flops_text(run.flops_until(row.step))
    return [decimal(loss), format_count(row.tokens), work, format_seconds(row.seconds)]


def _runs_key(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """The colour of each run, and its last loss."""
    _, read = loss_of(runs)
    items = "".join(
        f'<li><i class="swatch k{index}"></i>{escape(names[index])} '
        f"<span>{decimal(read(run.evaluations[-1])) if run.evaluations else ''}</span></li>"
        for index, run in enumerate(runs)
    )
    return f'<ul class="key">{items}</ul>'


def _memory(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Bytes of a step by part, in a visit to each run's largest block."""
    known = [(name, summary(run).memory) for name, run in zip(names, runs, strict=True)]
    memories = [(name if len(name) <= 24 else name[:23] + "…", memory) for name, memory in known if memory]
    if not memories:
        return ""
    return figure(
        "Memory of a step", "bytes by part, with the largest block active.", memory_bars(memories, css="named")
    )

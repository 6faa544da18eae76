"""The figures of one run: its losses, its visits, and what a step costs in memory and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby

import numpy as np

from blocktrain.report.chart import Bar, Dot, Line, Span, Track, line_chart, stacked_bars, timeline, values
from blocktrain.report.format import (
    Axis,
    alike,
    count_axis,
    decimal,
    flops_text,
    format_small,
    padded,
    percent,
    time_axis,
)
from blocktrain.report.records import Evaluation, Step, Visit
from blocktrain.report.run import RunRecord
from blocktrain.report.series import evenly, running_mean, thin, window
from blocktrain.report.summary import PART_ORDER, parts
from blocktrain.units import format_bytes, format_count, format_seconds

MOST_DOTS = 100  # evaluations beyond this are a line without dots
FEW = 20  # points; with fewer there is no steep start to cut off
START = 0.04  # share of a run's tokens in which the loss falls steeply
MOST_SPANS = 400  # visits beyond this are drawn without their text


def figure(title: str, note: str, *body: str, css: str = "") -> str:
    """A titled figure; `title` and `note` are plain text, `body` is markup."""
    caption = f"<figcaption><strong>{escape(title)}</strong> {escape(note)}</figcaption>"
    return f'<figure class="{escape(css)}">{caption}{"".join(body)}</figure>\n'


def plot(charts: str, name: str, data: str) -> str:
    """Charts that share one x axis and one crosshair, over the values in the data block `name`."""
    return f'<div class="plot" tabindex="0" data-values="{escape(name)}">{charts}</div>{data}'


def colour(run: RunRecord, block: int) -> str:
    """The class that carries a block's colour."""
    return f"k{block % max(len(run.header.blocks), 1)}"


def loss_unit(run: RunRecord) -> str:
    """The unit of `loss`; where a token is a byte, the log's two losses agree and the better known name is used."""
    bytewise = run.evaluations and all(
        row.loss_per_byte is not None and alike(row.loss, row.loss_per_byte) for row in run.evaluations
    )
    return "nats per byte" if bytewise else f"nats per {run.header.unit.removesuffix('s')}"


def key(run: RunRecord) -> str:
    """Which colour is which block, by its layers, and what the dots are."""
    items = [
        (
            colour(run, block.index),
            f"block {block.index}",
            f"{block.first} – {block.last}" if block.layers > 1 else block.first,
        )
        for block in run.header.blocks
    ]
    if run.is_full or len(items) < 2:
        items = [("k0", "training", "")]
    shown = items if len(items) <= 10 else [*items[:3], ("", "…", ""), items[-1]]
    swatches = "".join(
        (f'<li><i class="swatch {css}"></i>' if css else "<li>") + f"{escape(name)} <span>{escape(layers)}</span></li>"
        for css, name, layers in shown
    )
    return f'<ul class="key">{swatches}<li><i class="swatch ring"></i>validation</li></ul>'


def loss_by_tokens(run: RunRecord) -> str:
    """Training and validation loss over tokens, with the visits below on the same axis."""
    x = count_axis(f"training {run.header.unit}", run.tokens)
    below = _visits(run, x) if _has_blocks(run) else ""
    title = f"Loss by training {run.header.unit}"
    note = f"{loss_unit(run)}. {_how_drawn(run, _loss_axis(run))}" + (
        "Below, the block that was active; hover a bar for why its visit ended." if below else ""
    )
    charts, data = _loss(run, x, lambda row: row.tokens, "loss-tokens", foot=not below)
    return figure(title, note, key(run), plot(charts + below, "loss-tokens", data))


def loss_by_time(run: RunRecord) -> str:
    """The same losses over wall time."""
    x, second = time_axis(run.seconds)
    charts, data = _loss(run, x, lambda row: row.seconds / second, "loss-time")
    return figure("Loss by wall time", f"{loss_unit(run)}.", plot(charts, "loss-time", data))


def _has_blocks(run: RunRecord) -> bool:
    return not run.is_full and len(run.header.blocks) > 1 and bool(run.visits)


def _how_drawn(run: RunRecord, y: Axis) -> str:
    size = window(len(run.steps))
    text = "" if size == 1 else f"Faint: every logged step. Strong: the mean over {size} of them. "
    text += "The colour is the active block's. " if _has_blocks(run) else ""
    first = [row.loss for row in (*run.steps[:1], *run.evaluations[:1]) if row.loss > y.high]
    return text + (f"The start, at {max(first):.2f}, is above the frame. " if first else "")


Place = Callable[[Step | Evaluation], float]


def _means(run: RunRecord) -> list[float]:
    """Smoothed training loss; within visits, so that a jump at a switch stays one, where they are long enough."""
    raw = [row.loss for row in run.steps]
    size = window(len(raw))
    visits = [[row.loss for row in rows] for _, rows in groupby(run.steps, key=lambda row: row.visit)]
    if len(raw) < 2 * size * len(visits):
        return running_mean(raw, size)
    return [mean for losses in visits for mean in running_mean(losses, size)]


def _loss_axis(run: RunRecord) -> Axis:
    """Room for every mean and evaluation, and nearly every step."""
    points = [(row.tokens, mean) for row, mean in zip(run.steps, _means(run), strict=True)]
    points += [(row.tokens, row.loss) for row in run.evaluations]
    late = [row.loss for row in run.steps if row.tokens > START * run.tokens]
    return without_start("loss", points, run.tokens, _typical([row.loss for row in run.steps]), _typical(late))


def without_start(
    label: str,
    points: Sequence[tuple[float, float]],
    end: float,
    more: Sequence[float] = (),
    late: Sequence[float] = (),
) -> Axis:
    """An axis for losses over (tokens, loss) up to `end` tokens, and for `more`, of which `late` come after the start.

    The steep start is cut off where it would press the rest, which is what one reads, into less than two thirds
    of the height.
    """
    everything = [*more, *(loss for _, loss in points)]
    rest = [*late, *(loss for tokens, loss in points if tokens > START * end)]
    cut = len(points) >= FEW and _spread(rest) < _spread(everything) * 0.66
    return padded(label, rest if cut else everything)


def _spread(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) - min(finite) if finite else math.inf


def _loss(run: RunRecord, x: Axis, place: Place, name: str, *, foot: bool = True) -> tuple[str, str]:
    raw, mean, y = [row.loss for row in run.steps], _means(run), _loss_axis(run)
    shown = [run.evaluations[index] for index in thin([row.loss for row in run.evaluations])]
    lines = _coloured(run, thin(raw), raw, place, "raw") if window(len(raw)) > 1 else []
    lines.append(Line(points=[(place(row), row.loss) for row in shown], kind="validation"))
    lines += _coloured(run, thin(mean, 400), mean, place, "mean")
    dots = [_validation_dot(run, row, place) for row in shown] if len(shown) <= MOST_DOTS else []
    dots += [_validation_dot(run, run.evaluations[-1], place, decimal(run.evaluations[-1].loss))] if shown else []
    chart = line_chart(x, y, lines, dots, label=f"training and validation loss by {x.label}", height=300, foot=foot)
    return chart, values([_steps_track(run, raw, mean, place), _evaluations_track(run, shown, place)], x, y, name)


def _typical(raw: Sequence[float]) -> list[float]:
    """The range nearly all single steps lie in: one spike must not flatten the rest."""
    finite = [value for value in raw if math.isfinite(value)]
    return np.quantile(finite, [0.002, 0.998]).tolist() if finite else []


def _coloured(run: RunRecord, keep: Sequence[int], series: Sequence[float], place: Place, kind: str) -> list[Line]:
    """One line a stretch of the same block; each starts where the one before ended, so that the line is whole."""
    lines, joint = [], []
    for block, group in groupby(keep, key=lambda index: run.steps[index].block):
        points = [(place(run.steps[index]), series[index]) for index in group]
        lines.append(Line(points=joint + points, colour=colour(run, block), kind=kind))
        joint = points[-1:]
    return lines


def _validation_dot(run: RunRecord, row: Evaluation, place: Place, label: str = "") -> Dot:
    title = f"validation loss {decimal(row.loss)} after step {row.step:,}, {format_count(row.tokens)} {run.header.unit}"
    return Dot(x=place(row), y=row.loss, title=title, colour="ring", label=label)


def _steps_track(run: RunRecord, raw: Sequence[float], mean: Sequence[float], place: Place) -> Track:
    size = window(len(raw))
    names = ["step", run.header.unit, "time", "block", "loss", f"mean of {size}", "learning rate"]
    rows = []
    for index in evenly(len(raw), 400):
        row = run.steps[index]
        texts = [f"{row.step:,}", format_count(row.tokens), format_seconds(row.seconds), str(row.block)]
        texts += [decimal(raw[index]), decimal(mean[index]), format_small(row.lr)]
        rows.append((place(row), mean[index], colour(run, row.block), texts))
    drop = [name for name, unwanted in ((names[3], not _has_blocks(run)), (names[5], size == 1)) if unwanted]
    wanted = [at for at, name in enumerate(names) if name not in drop]
    kept = [(px, py, css, [texts[at] for at in wanted]) for px, py, css, texts in rows]
    return Track(columns=[names[at] for at in wanted], rows=kept)


def _evaluations_track(run: RunRecord, shown: Sequence[Evaluation], place: Place) -> Track:
    optional = {
        "per byte": [row.loss_per_byte for row in shown] if loss_unit(run) != "nats per byte" else [],
        "accuracy": [row.accuracy for row in shown],
    }
    extra = {name: column for name, column in optional.items() if any(value is not None for value in column)}
    rows = []
    for index, row in enumerate(shown):
        texts = [decimal(row.loss), f"{row.step:,}"]
        texts += [_extra_text(name, column[index]) for name, column in extra.items()]
        rows.append((place(row), row.loss, "ring", texts))
    return Track(columns=["validation", "after step", *extra], rows=rows)


def _extra_text(name: str, value: float | None) -> str:
    return percent(value) if name == "accuracy" and value is not None else decimal(value)


def _visits(run: RunRecord, x: Axis) -> str:
    retired = {row.visit: row for row in run.retirements}
    following = {before.visit: after for before, after in zip(run.visits, run.visits[1:], strict=False)}
    spans = []
    for visit in run.visits:
        end = retired.get(visit.visit) or following.get(visit.visit)
        stop = end.tokens if end else max(run.tokens, visit.tokens)
        title = "" if len(run.visits) > MOST_SPANS else _visit_text(run, visit)
        css = colour(run, visit.block) + ("" if visit.visit in retired else " open")
        spans.append(Span(row=visit.block, start=visit.tokens, stop=stop, title=title, colour=css))
    many = len(run.header.blocks) > 8
    names = ["" if many and block.index % 2 else str(block.index) for block in run.header.blocks]
    height = 10 if many else 20
    return '<p class="axis-name">active block</p>' + timeline(x, names, spans, label="visits", row_height=height)


def _visit_text(run: RunRecord, visit: Visit) -> str:
    text = f"visit {visit.visit}, sweep {visit.sweep}, block {visit.block}: from {format_count(visit.tokens)}"
    for row in run.retirements:
        if row.visit == visit.visit:
            took = format_seconds(row.seconds - visit.seconds)
            return f"{text} to {format_count(row.tokens)} {run.header.unit}, {took}; retired: {row.reason}"
    return f"{text} {run.header.unit}; not retired"


def by_tokens(run: RunRecord, title: str, note: str, read: Callable[[Step], float], name: str) -> str:
    """A small figure of one quantity of every step; nothing where the log has fewer than two values."""
    series = [read(row) for row in run.steps]
    if sum(map(math.isfinite, series)) < 2:
        return ""
    x = count_axis(f"training {run.header.unit}", run.tokens)
    y = padded(title, [value for value in [*_typical(series), 0.0] if math.isfinite(value)], count=3)
    lines = _coloured(run, thin(series, 400), series, lambda row: row.tokens, "fine")
    rows = [
        (row.tokens, series[index], colour(run, row.block), [f"{row.step:,}", format_small(series[index])])
        for index in evenly(len(series), 300)
        for row in (run.steps[index],)
    ]
    data = values([Track(columns=["step", title.lower()], rows=rows)], x, y, name)
    return figure(title, note, plot(line_chart(x, y, lines, label=title, height=110), name, data))


def accuracy(run: RunRecord) -> str:
    """Validation accuracy over tokens, for models that have one."""
    rows = [row for row in run.evaluations if row.accuracy is not None and math.isfinite(row.accuracy)]
    if not rows:
        return ""
    x = count_axis(f"training {run.header.unit}", run.tokens)
    shares = [100 * (row.accuracy or 0.0) for row in rows]
    y = padded("accuracy", shares)
    points = [(row.tokens, share) for row, share in zip(rows, shares, strict=True)]
    texts = [f"{share:.2f} % after step {row.step:,}" for row, share in zip(rows, shares, strict=True)]
    dots = [
        Dot(x=px, y=py, title=text, colour="ring" if row.block is None else colour(run, row.block))
        for (px, py), text, row in zip(points, texts, rows, strict=True)
    ]
    chart = line_chart(
        x,
        y,
        [Line(points=points, kind="validation")],
        dots if len(dots) <= MOST_DOTS else (),
        label="accuracy",
        height=200,
    )
    track = Track(
        columns=["accuracy", "after step"],
        rows=[(px, py, "ring", [f"{py:.2f} %", f"{row.step:,}"]) for (px, py), row in zip(points, rows, strict=True)],
    )
    return figure("Validation accuracy", "percent.", plot(chart, "accuracy", values([track], x, y, "accuracy")))


def memory(run: RunRecord) -> str:
    """Bytes of a step by part: full training, then each block."""
    if run.cost is None:
        return ""
    listed = [("full training", run.cost.memory_full)]
    if not run.is_full:
        listed += [(f"block {index}", block) for index, block in enumerate(run.cost.memory_blocks)]
    names = parts(*(memory for _, memory in listed))
    limit = max(sum(memory.values()) for _, memory in listed) or 1
    bars = [
        Bar(
            label=label,
            pieces=[
                (memory.get(part, 0), part_colour(part), f"{part}: {format_bytes(memory.get(part, 0))}")
                for part in names
            ],
            text=format_bytes(sum(memory.values())),
            strong=label == "full training",
        )
        for label, memory in listed
    ]
    chart = stacked_bars(bars, limit, label="memory of a step by part", row_height=26 if len(bars) <= 16 else 16)
    note = "bytes by part" + ("." if run.is_full else ", by the block that is active.")
    return figure("Memory of a step", note, parts_key(names), f'<div class="bars">{chart}</div>', css="half")


def part_colour(part: str) -> str:
    """The class that carries the colour of a part of memory."""
    return f"p{PART_ORDER.index(part) if part in PART_ORDER else len(PART_ORDER)}"


def parts_key(names: Sequence[str]) -> str:
    """Which colour is which part of memory."""
    items = "".join(f'<li><i class="swatch {part_colour(part)}"></i>{escape(part)}</li>' for part in names)
    return f'<ul class="key">{items}</ul>'


def flops(run: RunRecord) -> str:
    """Counted FLOPs of a step as shares of a full one: what was saved of them is pale, the formula a tick."""
    cost = run.cost
    if cost is None or run.is_full or not cost.flops_full or not cost.flops_blocks:
        return ""
    theory = [block / cost.theory_full if cost.theory_full else None for block in cost.theory_blocks]
    theory += [None] * (len(cost.flops_blocks) - len(theory))
    bars = [Bar(label="full training", pieces=[(1.0, "plain", flops_text(cost.flops_full))], text="1", strong=True)]
    by = _saved_by(run)
    means = [run.mean_step_flops(index) for index in range(len(cost.flops_blocks))]
    for index, (spent, counted, formula) in enumerate(zip(means, cost.flops_blocks, theory, strict=False)):
        work = (spent, counted, cost.flops_full)
        bars.append(_share_bar(f"block {index}", colour(run, index), work, formula, by))
    if len(cost.flops_blocks) > 1:
        known = [formula for formula in theory if formula is not None]
        expected = sum(known) / len(known) if known else None
        work = (sum(means) / len(means), sum(cost.flops_blocks) / len(means), cost.flops_full)
        bars.append(_share_bar("mean of blocks", "plain", work, expected, by, strong=True))
    chart = stacked_bars(bars, 1.0, label="FLOPs of a step", row_height=26 if len(bars) <= 16 else 16)
    note = f"counted, as a share of a full step's {flops_text(cost.flops_full)}. The tick is the formula's value"
    note += f"; pale, what {by} saved, which the formula does not know." if by else "."
    return figure("FLOPs of a step", note, f'<div class="bars">{chart}</div>', css="half")


def _saved_by(run: RunRecord) -> str:
    """What made steps cheaper than those of the whole model without a cache."""
    left_out = any(visit.left_out for visit in run.visits)
    return " and ".join(["the prefix cache"] * bool(run.cache_uses) + ["leaving out layers"] * left_out)


def _share_bar(
    label: str, css: str, work: tuple[float, float, int], formula: float | None, by: str, *, strong: bool = False
) -> Bar:
    """`work` is a step's FLOPs as spent, as counted of the whole model without a cache, and of a full step; `by` is
    what saved the rest."""
    spent, counted, full = work
    title = f"{flops_text(counted)} counted, {counted / full:.3f} of a full step"
    title += "" if formula is None else f"; formula {formula:.3f}"
    pieces = [(spent / full, css, title)]
    if spent < counted:
        saved = f"{flops_text(counted - spent)} saved by {by}, on average over the visits so far"
        pieces.append(((counted - spent) / full, f"{css} open", saved))
    return Bar(label=label, pieces=pieces, text=f"{spent / full:.3f}", mark=formula, mark_title=title, strong=strong)

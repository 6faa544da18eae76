"""Training and validation loss, over tokens (with the visits below) and over wall time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby

from blocktrain.records.run_records import Evaluation, Step
from blocktrain.report.axis import START, Axis, count_axis, time_axis, typical_range, without_start
from blocktrain.report.chart import Dot, Line, Stretch, Track, line_chart, timeline, values
from blocktrain.report.format import agree, decimal, format_small, percent
from blocktrain.report.run import RunRecord
from blocktrain.report.section import MOST_DOTS, Section, block_colour, has_several_blocks, plot
from blocktrain.report.series import evenly, running_mean, thin, window
from blocktrain.units import format_count, format_seconds

MOST_TITLES = 400  # more visits than this are drawn without a text for each


def visit_timeline(run: RunRecord, x: Axis) -> str:
    """A row for each block, a stretch for each visit, along the tokens of `x`."""
    ended = {row.visit: row for row in run.visit_ends}
    following = {before.visit: after for before, after in zip(run.visits, run.visits[1:], strict=False)}
    stretches = []
    for visit in run.visits:
        retired = ended.get(visit.visit)
        end = retired or following.get(visit.visit)
        title = f"visit {visit.visit}, sweep {visit.sweep}, block {visit.block}: from {format_count(visit.tokens)}"
        if retired:
            took = format_seconds(retired.seconds - visit.seconds)
            title += f" to {format_count(retired.tokens)} {run.header.unit}, {took}; retired: {retired.reason}"
        else:
            title += f" {run.header.unit}; not retired"
        stretches.append(
            Stretch(
                row=visit.block,
                start=visit.tokens,
                stop=end.tokens if end else max(run.tokens, visit.tokens),
                title="" if len(run.visits) > MOST_TITLES else title,
                colour=block_colour(run, visit.block) + ("" if visit.visit in ended else " open"),
            )
        )
    many = len(run.header.blocks) > 8
    names = ["" if many and block.index % 2 else str(block.index) for block in run.header.blocks]
    drawn = timeline(x, names, stretches, label="visits", row_height=10 if many else 20)
    return f'<p class="axis-name">active block</p>{drawn}'


ReadX = Callable[[Step | Evaluation], float]  # where a record lies on the x axis


def _has_losses(run: RunRecord) -> bool:
    return bool(run.steps or run.evaluations)


def _note(run: RunRecord) -> str:
    size = window(len(run.steps))
    text = f"{loss_unit(run)}. "
    text += "" if size == 1 else f"Faint: every logged step. Strong: the mean over {size} of them. "
    text += "The colour is that of the active block. " if has_several_blocks(run) else ""
    outside = [row.loss for row in (*run.steps[:1], *run.evaluations[:1]) if row.loss > _loss_axis(run).high]
    text += f"The start, at {max(outside):.2f}, is above the frame. " if outside else ""
    return text + ("Below: the active block. Hover over a bar to see why its visit ended." * has_several_blocks(run))


def _by_tokens(run: RunRecord) -> str:
    x = count_axis(f"training {run.header.unit}", run.tokens)
    below = visit_timeline(run, x) if has_several_blocks(run) else ""
    chart, data = _loss_chart(run, x, lambda row: row.tokens, "loss-tokens", foot=not below)
    return _key(run) + plot(chart + below, "loss-tokens", data)


def _by_time(run: RunRecord) -> str:
    x, second = time_axis(run.seconds)
    chart, data = _loss_chart(run, x, lambda row: row.seconds / second, "loss-time")
    return plot(chart, "loss-time", data)


BY_TOKENS = Section(title="Loss by training {unit}", note=_note, html=_by_tokens, condition=_has_losses)
BY_TIME = Section(
    title="Loss by wall time", note=lambda run: f"{loss_unit(run)}.", html=_by_time, condition=_has_losses
)


def loss_unit(run: RunRecord) -> str:
    """The unit of `loss`. Where a token is a byte the log's two losses agree, and the better known name is used."""
    bytewise = run.evaluations and all(
        row.loss_per_byte is not None and agree(row.loss, row.loss_per_byte) for row in run.evaluations
    )
    return "nats per byte" if bytewise else f"nats per {run.header.unit.removesuffix('s')}"


def coloured_lines(run: RunRecord, keep: Sequence[int], series: Sequence[float], x_of: ReadX, kind: str) -> list[Line]:
    """Lines of the values of `series` (one for each step of the run) at the indices `keep`, in the colour of the
    active block. Each line starts where the one before it ended, so that together they have no gap."""
    lines, joint = [], []
    for block, group in groupby(keep, key=lambda index: run.steps[index].block):
        points = [(x_of(run.steps[index]), series[index]) for index in group]
        lines.append(Line(points=joint + points, colour=block_colour(run, block), kind=kind))
        joint = points[-1:]
    return lines


def _key(run: RunRecord) -> str:
    """Which colour is which block, by its layers, and what the dots are."""
    items = [
        (
            block_colour(run, block.index),
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


def _loss_chart(run: RunRecord, x: Axis, x_of: ReadX, name: str, *, foot: bool = True) -> tuple[str, str]:
    """The chart, and the block of values that its crosshair reads."""
    raw, mean, y = [row.loss for row in run.steps], _means(run), _loss_axis(run)
    shown = [run.evaluations[index] for index in thin([row.loss for row in run.evaluations])]
    lines = coloured_lines(run, thin(raw), raw, x_of, "raw") if window(len(raw)) > 1 else []
    lines.append(Line(points=[(x_of(row), row.loss) for row in shown], kind="validation"))
    lines += coloured_lines(run, thin(mean, 400), mean, x_of, "mean")
    dots = [_validation_dot(run, row, x_of) for row in shown] if len(shown) <= MOST_DOTS else []
    if shown:
        last = run.evaluations[-1]
        dots.append(_validation_dot(run, last, x_of, label=decimal(last.loss)))
    chart = line_chart(x, y, lines, dots, label=f"training and validation loss by {x.label}", height=300, foot=foot)
    return chart, values([_steps_track(run, raw, mean, x_of), _evaluations_track(run, shown, x_of)], x, y, name)


def _means(run: RunRecord) -> list[float]:
    """The smoothed training loss. Visits that are long enough are smoothed one by one, so that a jump at a switch of
    blocks stays a jump."""
    raw = [row.loss for row in run.steps]
    size = window(len(raw))
    visits = [[row.loss for row in rows] for _, rows in groupby(run.steps, key=lambda row: row.visit)]
    if len(raw) < 2 * size * len(visits):
        return running_mean(raw, size)
    return [mean for losses in visits for mean in running_mean(losses, size)]


def _loss_axis(run: RunRecord) -> Axis:
    """Room for every mean and evaluation, and for nearly every step."""
    points = [(row.tokens, mean) for row, mean in zip(run.steps, _means(run), strict=True)]
    points += [(row.tokens, row.loss) for row in run.evaluations]
    late = [row.loss for row in run.steps if row.tokens > START * run.tokens]
    return without_start(
        "loss", points, run.tokens, typical_range([row.loss for row in run.steps]), typical_range(late)
    )


def _validation_dot(run: RunRecord, row: Evaluation, x_of: ReadX, *, label: str = "") -> Dot:
    title = f"validation loss {decimal(row.loss)} after step {row.step:,}, {format_count(row.tokens)} {run.header.unit}"
    return Dot(x=x_of(row), y=row.loss, title=title, colour="ring", label=label)


def _steps_track(run: RunRecord, raw: Sequence[float], mean: Sequence[float], x_of: ReadX) -> Track:
    size = window(len(raw))
    names = ["step", run.header.unit, "time", "block", "loss", f"mean of {size}", "learning rate"]
    rows = []
    for index in evenly(len(raw), 400):
        row = run.steps[index]
        texts = [f"{row.step:,}", format_count(row.tokens), format_seconds(row.seconds), str(row.block)]
        texts += [decimal(raw[index]), decimal(mean[index]), format_small(row.lr)]
        rows.append((x_of(row), mean[index], block_colour(run, row.block), texts))
    drop = [name for name, unwanted in ((names[3], not has_several_blocks(run)), (names[5], size == 1)) if unwanted]
    wanted = [at for at, name in enumerate(names) if name not in drop]
    kept = [(px, py, css, [texts[at] for at in wanted]) for px, py, css, texts in rows]
    return Track(columns=[names[at] for at in wanted], rows=kept)


def _evaluations_track(run: RunRecord, shown: Sequence[Evaluation], x_of: ReadX) -> Track:
    per_byte = loss_unit(run) != "nats per byte" and any(row.loss_per_byte is not None for row in shown)
    accuracy = any(row.accuracy is not None for row in shown)
    rows = []
    for row in shown:
        texts = [decimal(row.loss), f"{row.step:,}"]
        texts += [decimal(row.loss_per_byte)] * per_byte
        texts += [decimal(None) if row.accuracy is None else percent(row.accuracy)] * accuracy
        rows.append((x_of(row), row.loss, "ring", texts))
    columns = ["validation", "after step", *["per byte"] * per_byte, *["accuracy"] * accuracy]
    return Track(columns=columns, rows=rows)

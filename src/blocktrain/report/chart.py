"""Charts as inline SVG: lines, a timeline, stacked bars. Numbers and colours go in, markup comes out.

A chart has no fixed width. Its SVG fills its box and places everything by percentages, so that text keeps its
size on a telephone. Only the lines live in a nested SVG that stretches with the box:

    +-- svg (100 % wide) ------------------+
    | grid, dots, text: x and y in percent |
    |  +-- svg viewBox 0 0 4000 1000 ---+  |   preserveAspectRatio="none",
    |  | paths, strokes that do not     |  |   vector-effect: non-scaling-stroke
    |  | stretch                        |  |
    +--------------------------------------+
      tick texts hang outside, in the margin

Every text is escaped here, once: callers pass plain strings. A colour is the name of a CSS class that sets `--k`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from blocktrain.report.axis import Axis

WIDE, HIGH = 4000, 1000  # whole numbers on this grid are finer than a pixel


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points joined in order, in one colour. A point that is not finite leaves a gap. `kind` names the style."""

    points: Sequence[tuple[float, float]]
    colour: str = ""
    kind: str = "mean"


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One point. `title` shows when the pointer is over it, `label` is written beside it."""

    x: float
    y: float
    title: str
    colour: str = ""
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A stretch of one row of a timeline."""

    row: int
    start: float
    stop: float
    title: str
    colour: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row of stacked bars: pieces as (value, colour, title), a text at their end, and a tick across at `mark`."""

    label: str
    pieces: Sequence[tuple[float, str, str]]
    text: str
    mark: float | None = None
    mark_title: str = ""
    strong: bool = False


@dataclass(frozen=True, kw_only=True)
class Track:
    """What the crosshair reads: rows of (x, y, colour, one text a column); y is None for no marker."""

    columns: Sequence[str]
    rows: Sequence[tuple[float, float | None, str, Sequence[str]]]


def line_chart(
    x: Axis, y: Axis, lines: Sequence[Line], dots: Sequence[Dot] = (), *, label: str, height: int, foot: bool = True
) -> str:
    """Lines over a grid. `foot` writes the x axis below, unless another chart below shares it."""
    grid = "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>'
        f'<text class="tick" x="-8" y="{at}" dy=".35em" text-anchor="end">{escape(text)}</text>'
        for value, text in y.ticks
        for at in (_percent(1 - y.at(value)),)
    )
    paths = "".join(
        f'<path class="{escape(line.kind)} {escape(line.colour)}" d="{data}"/>'
        for line in lines
        if (data := _path(x, y, line.points))
    )
    plot = (
        f'<svg class="lines" viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" width="100%" height="100%">'
        f"{paths}</svg>"
    )
    content = grid + _columns(x) + plot + "".join(_dot(x, y, dot) for dot in dots) + (_foot(x) if foot else "")
    return _svg(content, height, label)


def timeline(x: Axis, rows: Sequence[str], stretches: Sequence[Stretch], *, label: str, row_height: int) -> str:
    """Rows of stretches along `x`, with each row's name in the margin."""
    names = "".join(
        f'<text class="tick" x="-8" y="{(row + 0.5) * row_height:.1f}" dy=".35em" text-anchor="end">'
        f"{escape(name)}</text>"
        for row, name in enumerate(rows)
    )
    bars = "".join(
        f'<rect class="fill {escape(item.colour)}" x="{_percent(x.at(item.start))}" y="{item.row * row_height + 2}" '
        f'width="{_percent(x.at(item.stop) - x.at(item.start))}" height="{row_height - 4}">{_title(item.title)}</rect>'
        for item in stretches
    )
    return _svg(_columns(x) + names + bars + _foot(x), len(rows) * row_height, label)


def stacked_bars(bars: Sequence[Bar], limit: float, *, label: str, row_height: int = 26) -> str:
    """Horizontal bars; `limit` is the value that fills the width."""
    parts, thick = [], row_height * 0.62
    for row, bar in enumerate(bars):
        middle, weight = (row + 0.5) * row_height, " strong" if bar.strong else ""
        parts.append(
            f'<text class="tick{weight}" x="-10" y="{middle:.1f}" dy=".35em" text-anchor="end">'
            f"{escape(bar.label)}</text>"
        )
        start = 0.0
        for value, colour, title in bar.pieces:
            parts.append(
                f'<rect class="fill {escape(colour)}" x="{_percent(start / limit)}" y="{middle - thick / 2:.1f}" '
                f'width="{_percent(value / limit)}" height="{thick:.1f}">{_title(title)}</rect>'
            )
            start += value
        if bar.mark is not None:
            at = _percent(bar.mark / limit)
            parts.append(
                f'<line class="mark" x1="{at}" x2="{at}" y1="{middle - row_height * 0.44:.1f}" '
                f'y2="{middle + row_height * 0.44:.1f}">{_title(bar.mark_title)}</line>'
            )
        end = _percent(max(start, bar.mark or 0.0) / limit)
        parts.append(
            f'<text class="value{weight}" x="{end}" y="{middle:.1f}" dx="8" dy=".35em">{escape(bar.text)}</text>'
        )
    return _svg("".join(parts), len(bars) * row_height, label)


def values(tracks: Sequence[Track], x: Axis, y: Axis, name: str) -> str:
    """The numbers behind a plot, for the crosshair, as a data block with the id `name`.

    The three characters that could end the block or start markup are written as JSON escapes.
    """
    content = [
        {
            "columns": list(track.columns),
            "rows": [
                [round(x.at(px), 4), None if py is None else round(1 - y.at(py), 4), colour, *texts]
                for px, py, colour, texts in track.rows
                if math.isfinite(px) and (py is None or math.isfinite(py))
            ],
        }
        for track in tracks
    ]
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'


def _svg(content: str, height: int, label: str) -> str:
    return f'<svg class="chart" height="{height}" role="img" aria-label="{escape(label)}">{content}</svg>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _percent(share: float) -> str:
    return f"{share * 100:.2f}%"


def _path(x: Axis, y: Axis, points: Sequence[tuple[float, float]]) -> str:
    """SVG path data of the pieces between gaps. A lone point becomes a short dash, as it would not show otherwise."""
    path, piece = "", []
    for px, py in [*points, (math.nan, math.nan)]:
        if math.isfinite(px) and math.isfinite(py):
            piece.append((round(x.at(px) * WIDE), round((1 - y.at(py)) * HIGH)))
        elif len(piece) == 1:
            path += f"M{min(max(piece[0][0] - 5, 0), WIDE - 10)},{piece[0][1]} h10"
            piece = []
        elif piece:
            path += "M" + " ".join(f"{across},{down}" for across, down in piece)
            piece = []
    return path


def _columns(x: Axis) -> str:
    return "".join(
        f'<line class="grid" x1="{at}" x2="{at}" y1="0" y2="100%"/>'
        for value, _ in x.ticks
        for at in (_percent(x.at(value)),)
    )


def _foot(x: Axis) -> str:
    ticks = "".join(
        f'<text class="tick" x="{_percent(x.at(value))}" y="100%" dy="17" text-anchor="middle">{escape(text)}</text>'
        for value, text in x.ticks
    )
    return f'{ticks}<text class="name" x="100%" y="100%" dy="35" text-anchor="end">{escape(x.label)}</text>'


def _dot(x: Axis, y: Axis, dot: Dot) -> str:
    if not (math.isfinite(dot.x) and y.low <= dot.y <= y.high):
        return ""
    cx, cy = _percent(x.at(dot.x)), _percent(1 - y.at(dot.y))
    text = (
        f'<text class="value" x="{cx}" y="{cy}" dy="-9" text-anchor="{"end" if x.at(dot.x) > 0.9 else "middle"}">'
        f"{escape(dot.label)}</text>"
        if dot.label
        else ""
    )
    return f'<circle class="dot {escape(dot.colour)}" cx="{cx}" cy="{cy}" r="3">{_title(dot.title)}</circle>{text}'

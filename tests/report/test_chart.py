"""Charts are well-formed markup with things where the numbers say."""

import json
import math
import re
from xml.etree import ElementTree

import pytest

from blocktrain.report.axis import Axis, axis
from blocktrain.report.chart import (
    HIGH,
    WIDE,
    Bar,
    Dot,
    Line,
    Stretch,
    Track,
    line_chart,
    stacked_bars,
    timeline,
    values,
)

X = axis("tokens", 0, 100)
Y = axis("loss", 0, 10)


def paths(markup: str) -> list[str]:
    return [path.attrib["d"] for path in ElementTree.fromstring(markup).iter("path")]


def test_a_line_goes_through_its_points():
    drawn = line_chart(X, Y, [Line(points=[(0, 10), (50, 5), (100, 0)])], label="loss", height=100)
    assert paths(drawn) == [f"M0,0 {WIDE // 2},{HIGH // 2} {WIDE},{HIGH}"]


def test_a_value_that_is_not_finite_is_a_gap_and_a_lone_point_still_shows():
    line = Line(points=[(0, 5), (10, 5), (20, math.nan), (30, 5), (40, math.inf), (50, math.nan)])
    (path,) = paths(line_chart(X, Y, [line], label="loss", height=100))
    assert path == "M0,500 400,500M1195,500 h10"


@pytest.mark.parametrize("points", [[], [(0, math.nan)]])
def test_nothing_to_draw_draws_no_path(points: list[tuple[float, float]]):
    assert paths(line_chart(X, Y, [Line(points=points)], label="loss", height=100)) == []


def test_a_dot_outside_the_frame_is_left_out():
    drawn = line_chart(X, Y, [], [Dot(x=1, y=11, title="no"), Dot(x=1, y=9, title="yes")], label="loss", height=100)
    assert [title.text for title in ElementTree.fromstring(drawn).iter("title")] == ["yes"]


def test_timeline_spans_cover_their_share_of_the_width():
    span = Stretch(row=1, start=25, stop=75, title="visit 1", colour="k1")
    (rect,) = ElementTree.fromstring(timeline(X, ["0", "1"], [span], label="visits", row_height=20)).iter("rect")
    assert (rect.attrib["x"], rect.attrib["width"], rect.attrib["y"]) == ("25.00%", "50.00%", "22")


def test_bars_are_stacked_end_to_end_with_a_mark_across():
    bar = Bar(label="full", pieces=[(30, "p0", "weights"), (20, "p1", "master")], text="50 B", mark=40)
    root = ElementTree.fromstring(stacked_bars([bar], 100, label="memory"))
    assert [(r.attrib["x"], r.attrib["width"]) for r in root.iter("rect")] == [
        ("0.00%", "30.00%"),
        ("30.00%", "20.00%"),
    ]
    assert [line.attrib["x1"] for line in root.iter("line")] == ["40.00%"]
    assert [text.text for text in root.iter("text")] == ["full", "50 B"]


def test_markup_in_any_text_comes_out_escaped():
    evil = "</svg><script>alert(1)</script>\"'&"
    bad = Axis(label=evil, low=0, high=100, ticks=((50, evil),))
    dots = [Dot(x=50, y=50, title=evil, colour=evil, label=evil)]
    drawn = line_chart(bad, bad, [Line(points=[(0, 0), (1, 1)], colour=evil, kind=evil)], dots, label=evil, height=9)
    drawn += timeline(bad, [evil], [Stretch(row=0, start=0, stop=9, title=evil, colour=evil)], label=evil, row_height=9)
    drawn += stacked_bars(
        [Bar(label=evil, pieces=[(1, evil, evil)], text=evil, mark=1, mark_title=evil)], 9, label=evil
    )
    assert "<script" not in drawn
    root = ElementTree.fromstring(f"<all>{drawn}</all>")
    assert len(list(root)) == 3
    assert {element.text for element in root.iter("title")} == {evil}


def test_data_block_cannot_be_ended_from_inside_and_reads_back():
    evil = "</script><!-- & <b>"
    block = values([Track(columns=[evil], rows=[(50, 5, "k0", [evil]), (60, math.nan, "k0", ["gone"])])], X, Y, "name")
    inside = re.fullmatch(r'<script type="application/json" id="name">(.*)</script>', block)
    assert inside is not None
    assert "<" not in inside[1]
    assert json.loads(inside[1]) == [{"columns": [evil], "rows": [[0.5, 0.5, "k0", evil]]}]

"""Colours differ, also for eyes that lack one kind of cone, and stand out from the page."""

import math
from collections.abc import Iterable
from itertools import combinations, pairwise

import pytest

from blocktrain.report.palette import HUES, PARTS, RAMP, Colour, colours, style

GROUNDS = ("#fdfdfb", "#14161a")

# Linear RGB as seen without the L or the M cones (Viénot, Brettel and Mollon 1999).
DEFICIENT = {
    "protan": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
    "deutan": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
}


def linear(colour: str) -> list[float]:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(rgb: list[float]) -> list[float]:
    """CIE L*a*b* of linear RGB, white D65."""
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    x, y, z = (sum(m * c for m, c in zip(row, rgb, strict=True)) for row in matrix)
    fx, fy, fz = ((max(v, 0) / w) ** (1 / 3) for v, w in zip((x, y, z), (0.9505, 1.0, 1.089), strict=True))
    return [116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)]


def seen(colour: str, eyes: str) -> list[float]:
    rgb = linear(colour)
    return lab([sum(m * c for m, c in zip(row, rgb, strict=True)) for row in DEFICIENT[eyes]])


def luminance(colour: str) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


@pytest.mark.parametrize("eyes", ["protan", "deutan"])
@pytest.mark.parametrize("page", [0, 1])
def test_colours_stay_apart_for_colour_blind_eyes(eyes: str, page: int):
    """CIE 1976 distance; about 2 is the least one sees side by side. A seventh hue (olive) fell to 5.5."""

    def least(pairs: Iterable[tuple[Colour, Colour]]) -> float:
        return min(math.dist(seen(one[page], eyes), seen(other[page], eyes)) for one, other in pairs)

    assert least(combinations(HUES, 2)) > 10
    assert least(pairwise(colours(len(HUES) + 1))) > 8
    assert least(pairwise(PARTS)) > 15


@pytest.mark.parametrize("page", [0, 1])
def test_colours_stand_out_from_the_page(page: int):
    for colour in [*HUES, *RAMP]:
        light, dark = sorted((luminance(colour[page]), luminance(GROUNDS[page])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 2.0, colour[page]


@pytest.mark.parametrize("count", [1, 6, 7, 40])
def test_every_block_has_its_own_colour(count: int):
    assert len(set(colours(count))) == count
    rules = style(count)
    assert rules.count(f".k{count - 1}{{") == 2  # light and dark


def test_the_ramp_grows_lighter():
    for page in (0, 1):
        lightness = [luminance(colour[page]) for colour in colours(16)]
        assert lightness == sorted(lightness)

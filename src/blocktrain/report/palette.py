"""Colours for light and dark pages, which readers without red or green cones can tell apart too.

Up to six blocks or runs take hues after Okabe and Ito (jfly.uni-koeln.de/color), adjusted for each background. More
take a ramp in the manner of viridis: blocks have an order, and so has the ramp's lightness. On a ramp of sixteen,
neighbours look alike to anyone, so the timeline's rows and the crosshair name the block as well: no figure relies on
colour alone.
"""

from __future__ import annotations

Colour = tuple[str, str]  # on a light page, on a dark page

HUES: tuple[Colour, ...] = (
    ("#0072b2", "#4fa8e6"),  # blue
    ("#e08e00", "#f2b23e"),  # orange
    ("#00906a", "#2fc89c"),  # green
    ("#b8558f", "#e698c3"),  # rose
    ("#45a5df", "#96d4f8"),  # sky
    ("#cf5500", "#ff8548"),  # vermilion
)
RAMP: tuple[Colour, ...] = (
    ("#44237a", "#6450c4"),
    ("#35609a", "#4a8ad8"),
    ("#20908c", "#35b5ab"),
    ("#4caa55", "#8edb78"),
    ("#b5a414", "#fdf07a"),
)
# Parts of memory in the order they are stacked: neutral for what every method holds, warm for what training adds.
PARTS: tuple[Colour, ...] = (
    ("#56667c", "#8394ad"),  # weights
    ("#8fa3bd", "#566780"),  # master
    ("#e3b27a", "#e6b77f"),  # gradients
    ("#b4532a", "#cf6a3c"),  # moments
    ("#d5dbe3", "#39424f"),  # activations
    ("#77706a", "#a59d96"),  # anything else
)


def colours(count: int) -> tuple[Colour, ...]:
    """One colour for each of `count` blocks or runs."""
    if count <= len(HUES):
        return HUES[:count]
    found = []
    for index in range(count):
        place = index / (count - 1) * (len(RAMP) - 1)
        step = min(int(place), len(RAMP) - 2)
        low, high = RAMP[step], RAMP[step + 1]
        found.append((_mix(low[0], high[0], place - step), _mix(low[1], high[1], place - step)))
    return tuple(found)


def _mix(low: str, high: str, share: float) -> str:
    pairs = ((int(low[at : at + 2], 16), int(high[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def style(count: int) -> str:
    """Style rules: the classes `k0`, `k1`, ... set `--k` to the colour of a block or run, `p0`, `p1`, ... to that of a
    part of memory."""
    named = [(f"k{index}", colour) for index, colour in enumerate(colours(count))]
    named += [(f"p{index}", colour) for index, colour in enumerate(PARTS)]
    light = "".join(f".{name}{{--k:{colour[0]}}}" for name, colour in named)
    dark = "".join(f".{name}{{--k:{colour[1]}}}" for name, colour in named)
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}"

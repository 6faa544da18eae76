"""A plan as a page: memory by part against the card's limit, cost against time, and the layouts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from blocktrain.plan.fit import Candidate
from blocktrain.plan.memory import PARTS
from blocktrain.plan.outcome import Outcome, assumptions, binding, savings, spread
from blocktrain.report.chart import Bar, Dot, line_chart, stacked_bars
from blocktrain.report.figures import figure
from blocktrain.report.numerals import axis
from blocktrain.report.page import document
from blocktrain.units import format_bytes, format_count, format_seconds

# Which colour of the palette's parts each part of memory takes (palette.py, PARTS).
COLOURS = {
    name: f"p{index}" for index, name in enumerate(("weights", "master", "gradients", "optimizer", "activations"))
}
OTHER = "p5"
MOST_BARS = 10


def plan_page(outcome: Outcome) -> str:
    """One self-contained HTML page."""
    request = outcome.request
    title = f"Plan: {request.spec.name} on {request.cards} x {request.card}"
    found = outcome.fit.candidates[:MOST_BARS]
    lede = f"{format_count(request.spec.parameters)} parameters, {format_count(request.tokens)} tokens. "
    lede += _words(found[0]) if found else "Nothing fits."
    header = f'<h1>{escape(title)}</h1>\n<p class="lede">{escape(lede)}</p>\n'
    body = _memory(outcome, found) + _cost(outcome, found) + _table(outcome, found)
    notes = "".join(f"<li>{escape(line)}</li>" for line in assumptions(outcome))
    footer = "<p>Written by blocktrain plan.</p>\n"
    return document(title, header, body + f"<section><h2>What this rests on</h2><ul>{notes}</ul></section>", footer, 3)


def label(item: Candidate) -> str:
    """A layout in a few words."""
    layout = item.layout
    what = f"{layout.blocks} blocks" if layout.blocks > 1 else layout.method
    return f"{what}, {layout.precision.name}"


def _words(item: Candidate) -> str:
    cost = "" if item.dollars is None else f", {item.dollars}"
    return f"Best: {label(item)}, {format_bytes(item.memory.peak)} a card, {format_seconds(item.seconds)}{cost}."


def _memory(outcome: Outcome, found: Sequence[Candidate]) -> str:
    over = outcome.fit.overflow
    shown = [(label(item), item.memory) for item in found] or ([("nearest miss", over.memory)] if over else [])
    room = outcome.request.room.card
    limit = max([room, *(memory.peak for _, memory in shown)]) * 1.02
    bars = [
        Bar(
            label=name,
            pieces=[
                (
                    memory.parts.get(part, 0.0),
                    COLOURS.get(part, OTHER),
                    f"{part}: {format_bytes(memory.parts.get(part, 0))}",
                )
                for part in PARTS
            ],
            text=format_bytes(memory.peak),
            mark=room,
            mark_title=f"the card holds {format_bytes(room)}",
        )
        for name, memory in shown
    ]
    items = "".join(f'<li><i class="swatch {COLOURS.get(part, OTHER)}"></i>{escape(part)}</li>' for part in PARTS)
    note = "bytes by part at the worst moment of a step. The tick is what a card holds."
    chart = stacked_bars(bars, limit, label="peak memory by part")
    return figure("Memory of a card", note, f'<ul class="key">{items}</ul>', f'<div class="bars named">{chart}</div>')


def _cost(outcome: Outcome, found: Sequence[Candidate]) -> str:
    others = [(item.label + f", {item.cards} x {item.card}", item.candidate) for item in outcome.alternatives]
    points = [(label(item), item, "k0") for item in found]
    points += [(name, item, "k1") for name, item in others if item is not None]
    priced = [
        (name, item.seconds / 3600, float(item.dollars.amount), css) for name, item, css in points if item.dollars
    ]
    if not priced:
        return ""
    x = axis("hours", 0.0, max(hours for _, hours, _, _ in priced) * 1.1)
    y = axis("dollars", 0.0, max(usd for _, _, usd, _ in priced) * 1.1, count=5)
    dots = [
        Dot(x=hours, y=usd, title=f"{name}: {hours:.1f} hours, ${usd:,.0f}", colour=css)
        for name, hours, usd, css in priced
    ]
    items = (
        '<ul class="key"><li><i class="swatch k0"></i>in blocks</li><li><i class="swatch k1"></i>other means</li></ul>'
    )
    chart = line_chart(x, y, [], dots, label="cost against time", height=240)
    note = "dollars against hours, to the same loss at the multiplier below. Hover a dot for its layout."
    return figure("Cost against time", note, items, f'<div class="plot">{chart}</div>')


def _table(outcome: Outcome, found: Sequence[Candidate]) -> str:
    headings = ("layout", "cards", "rows", "savings", "cache", "memory", "step", "tokens/s", "time", "cost", "limit")
    head = "".join(f'<th scope="col">{name}</th>' for name in headings)
    rows = "".join(
        f'<tr><th scope="row">{escape(label(item))}</th>'
        + "".join(
            f"<td>{escape(cell)}</td>"
            for cell in (
                spread(item),
                str(item.layout.micro_rows),
                savings(item),
                item.layout.cache,
                format_bytes(item.memory.peak),
                f"{item.step.seconds:.3g} s",
                format_count(round(item.tokens_per_second)),
                format_seconds(item.seconds),
                "–" if item.dollars is None else str(item.dollars),
                binding(outcome, item),
            )
        )
        + "</tr>\n"
        for item in found
    )
    body = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="scroll"><table><caption>Layouts</caption>{body}</table></div>\n'

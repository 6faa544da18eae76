"""A plan as a page: memory by part and what a card holds, cost against time, and the layouts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from blocktrain.plan.fit import Candidate
from blocktrain.plan.outcome import Outcome, alternative_cells, assumptions, binding, memory_savers, money, span, spread
from blocktrain.report.axis import axis
from blocktrain.report.chart import Bar, Dot, line_chart, stacked_bars
from blocktrain.report.page import document
from blocktrain.report.section import figure
from blocktrain.units import format_bytes, format_count

# What a bar shows in one colour, in the order of the palette's colours for parts of memory (palette.py, PARTS).
PARTS_BY_LABEL = {
    "frozen": ("frozen",),
    "active and master": ("active", "master"),
    "gradients": ("gradients",),
    "moments": ("moments",),
    "activations": ("activations",),
    "logits": ("logits",),
}
MOST_BARS = 10


def plan_page(outcome: Outcome) -> str:
    """One self-contained HTML page."""
    request = outcome.request
    title = f"Plan: {request.spec.name} on {request.cards} x {request.card}"
    found = outcome.fit.candidates[:MOST_BARS]
    lede = f"{format_count(request.spec.parameters)} parameters, {format_count(request.tokens)} tokens. "
    if found:
        best = found[0]
        cost = "" if best.dollars is None else f", {best.dollars}"
        lede += f"Best: {label(best)}, {format_bytes(best.memory.peak)} per card, {span(best.seconds)}{cost}."
    else:
        lede += "Nothing fits."
    header = f'<h1>{escape(title)}</h1>\n<p class="lede">{escape(lede)}</p>\n'
    body = _memory(outcome, found) + _cost(outcome, found) + _layouts(outcome, found) + _alternatives(outcome)
    notes = "".join(f"<li>{escape(line)}</li>" for line in assumptions(outcome))
    footer = "<p>Written by blocktrain plan.</p>\n"
    return document(title, header, body + f"<section><h2>What this rests on</h2><ul>{notes}</ul></section>", footer, 3)


def label(item: Candidate) -> str:
    """A layout in a few words."""
    layout = item.layout
    what = f"{layout.blocks} blocks" if layout.blocks > 1 else layout.method
    return f"{what}, {layout.precision.name}"


def _memory(outcome: Outcome, found: Sequence[Candidate]) -> str:
    over = outcome.fit.overflow
    shown = [(label(item), item.memory) for item in found] or ([("nearest to fitting", over.memory)] if over else [])
    card = outcome.request.capacity.card
    limit = max([card, *(memory.peak for _, memory in shown)]) * 1.02
    bars = []
    for name, memory in shown:
        pieces = []
        for index, (part, members) in enumerate(PARTS_BY_LABEL.items()):
            size = sum(memory.parts[member] for member in members)
            pieces.append((size, f"p{index}", f"{part}: {format_bytes(size)}"))
        title = f"the card holds {format_bytes(card)}"
        bars.append(Bar(label=name, pieces=pieces, text=format_bytes(memory.peak), mark=card, mark_title=title))
    items = "".join(f'<li><i class="swatch p{index}"></i>{name}</li>' for index, name in enumerate(PARTS_BY_LABEL))
    note = "bytes by part in the worst phase of a step. The tick marks what a card holds."
    chart = stacked_bars(bars, limit, label="peak memory by part")
    return figure("Memory of a card", note, f'<ul class="key">{items}</ul>', f'<div class="bars named">{chart}</div>')


def _cost(outcome: Outcome, found: Sequence[Candidate]) -> str:
    others = [(item.label + f", {item.cards} x {item.card}", item.candidate) for item in outcome.alternatives]
    points = [(label(item), item, "k0" if item.layout.blocks > 1 else "k1") for item in found]
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
    note = "dollars against hours, to the same loss at the multiplier below. Point at a dot to see its layout."
    return figure("Cost against time", note, items, f'<div class="plot">{chart}</div>')


def _layouts(outcome: Outcome, found: Sequence[Candidate]) -> str:
    headings = (
        *("layout", "cards", "rows at a time", "saves memory by", "cache"),
        *("memory", "step", "tokens/s", "time", "cost", "limit"),
    )
    rows = [
        (
            label(item),
            spread(item),
            str(item.layout.micro_rows),
            memory_savers(item),
            item.layout.cache,
            format_bytes(item.memory.peak),
            f"{item.step.seconds:.3g} s",
            format_count(round(item.tokens_per_second)),
            span(item.seconds),
            money(item.dollars),
            binding(outcome, item),
        )
        for item in found
    ]
    return _table("Layouts", headings, rows) if rows else ""


def _alternatives(outcome: Outcome) -> str:
    headings = ("method", "cards", "memory", "step", "time", "cost", "blocks are cheaper up to")
    rows = [
        (item.label, f"{'' if item.candidate else 'up to '}{item.cards} x {item.card}", *alternative_cells(item))
        for item in outcome.alternatives
    ]
    return _table("The same tokens by other means", headings, rows)


def _table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in headings)
    lines = "".join(
        f'<tr><th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n"
        for first, *cells in rows
    )
    body = f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody>"
    return f'<div class="scroll"><table class="dense"><caption>{escape(caption)}</caption>{body}</table></div>\n'

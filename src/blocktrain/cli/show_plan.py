"""A plan in the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from blocktrain.plan.fit import Candidate
from blocktrain.plan.layout import Layout
from blocktrain.plan.outcome import (
    DASH,
    Outcome,
    alternative_cells,
    assumptions,
    at_multipliers,
    binding,
    memory_savers,
    money,
    span,
)
from blocktrain.units import format_bytes, format_count

MOST_LAYOUTS = 8
NARROW = 96  # columns; below, tables leave out what matters less
SIDE_BY_SIDE = 72  # columns; below, the time of a step stands below its memory
# Columns of the layouts that a narrower terminal has no room for, the first to be left out first.
LEFT_OUT_FIRST = ("ckpt", "limit", "cache", "micro", "dxpxs", "time")


def show(outcome: Outcome, console: Console, verified: float | None) -> None:
    """Print the layouts, the parts of the best one, the alternatives, and what it all rests on."""
    request = outcome.request
    spec = request.spec
    console.print(
        f"[bold]{spec.name}[/bold]  {format_count(spec.parameters)} parameters on {request.cards} x {request.card}, "
        f"{format_count(request.tokens)} tokens",
        highlight=False,
    )
    if outcome.fit.candidates:
        console.print(_layouts(outcome, console))
        best = outcome.fit.candidates[0]
        if memory_savers(best) != DASH:
            console.print(f"Layout 1 also saves memory by: {memory_savers(best)}", highlight=False)
        console.print(_parts(outcome, best, console.width))
        if verified is not None:
            share = best.memory.peak / verified - 1
            console.print(
                f"Verified: a tracker finds a peak of {format_bytes(verified)}; the plan differs by {share:+.1%}.",
                highlight=False,
            )
        if best.layout.blocks > 1 and best.dollars is not None and best.step_dollars is not None:
            costs = at_multipliers(best, request.multiplier.value)
            console.print(
                f"\nA step costs ${float(best.step_dollars.amount):.2g}. Training to the same loss costs, by B-F "
                "multiplier:\n" + ", ".join(f"{usd} at {value:g} ({name})" for name, value, usd in costs),
                highlight=False,
            )
    else:
        _nothing_fits(outcome, console)
    console.print(_alternatives(outcome, console))
    console.print("\nWhat this rests on", style="bold")
    for line in assumptions(outcome):
        console.print(f"- {line}", style="dim", highlight=False)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))


def _fits(table: Table, console: Console) -> bool:
    """Whether no cell of the table would be cut off."""
    return Measurement.get(console, console.options.update_width(10_000), table).maximum <= console.width


def _layouts(outcome: Outcome, console: Console) -> Table:
    """One row per layout, with the columns that there is room for."""
    hidden = {"host", "tok/s", "step"} if console.width < NARROW else set()
    if outcome.request.cards == 1:
        hidden.add("dxpxs")
    table = _layout_table(outcome, hidden)
    for name in LEFT_OUT_FIRST:
        if _fits(table, console):
            break
        hidden.add(name)
        table = _layout_table(outcome, hidden)
    return table


def _layout_table(outcome: Outcome, hidden: Collection[str]) -> Table:
    table = _table("\nLayouts that fit, best first")
    columns: dict[str, Callable[[Candidate], str]] = {
        "blocks": lambda item: {"full": "full", "offload": "offl."}.get(item.layout.method, str(item.layout.blocks)),
        "precision": lambda item: item.layout.precision.name,
        "micro": lambda item: str(item.layout.micro_rows),
        "ckpt": lambda item: "yes" if item.layout.checkpointing == "layers" else DASH,
        "cache": lambda item: item.layout.cache if item.layout.cache != "off" else DASH,
        "dxpxs": lambda item: f"{item.layout.data}x{item.layout.pipeline}x{item.layout.shards}",
        "memory": lambda item: format_bytes(item.memory.peak).replace("iB", ""),
        "host": lambda item: format_bytes(item.memory.host_bytes).replace("iB", ""),
        "step": lambda item: f"{item.step.seconds:.3g}s",
        "tok/s": lambda item: format_count(round(item.tokens_per_second)),
        "time": lambda item: span(item.seconds),
        "cost": lambda item: money(item.dollars),
        "limit": lambda item: binding(outcome, item),
    }
    columns = {name: read for name, read in columns.items() if name not in hidden}
    table.add_column("")
    for heading in columns:
        left = heading in ("precision", "cache", "ckpt", "limit")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for number, item in enumerate(outcome.fit.candidates[:MOST_LAYOUTS], 1):
        table.add_row(str(number), *(read(item) for read in columns.values()))
    words = {
        "micro": "micro: rows at a time",
        "ckpt": "ckpt: activation checkpointing",
        "dxpxs": "dxpxs: data-parallel ranks x pipeline stages x shards",
    }
    table.caption = "; ".join(text for name, text in words.items() if name in columns)
    table.caption_justify = "left"
    return table


def _parts(outcome: Outcome, best: Candidate, width: int) -> Table:
    """Memory in the worst phase of a step and the time of a step, side by side."""
    table = _table(f"\nLayout 1: memory at its peak ({best.memory.phase}), and the time of a step")
    is_wide = width >= SIDE_BY_SIDE
    for justify in ("left", "right", "left") * (2 if is_wide else 1):
        table.add_column(justify=justify)
    bar = max(8, min(24, (width - 60) // 2 if is_wide else width - 40))
    card = outcome.request.capacity.card
    memory = [(name, size, size / card) for name, size in best.memory.parts.items() if size >= 0.5]
    seconds = best.step.seconds
    steps = [(name, size, size / seconds) for name, size in best.step.parts.items() if size > 0]
    steps.append(("total", seconds, 1.0))
    memory.append(("total", best.memory.peak, best.memory.peak / card))
    memory += [(f"host: {name}", size, -1.0) for name, size in best.memory.host.items()]
    memory += [(f"disk: {name}", size, -1.0) for name, size in best.memory.disk.items()]
    if not is_wide:
        for rows, text in ((memory, format_bytes), (steps, lambda size: f"{size:.3g} s")):
            for index in range(len(rows)):
                table.add_row(*_cells(rows, index, bar, text))
            table.add_section()
        return table
    for index in range(max(len(memory), len(steps))):
        cells = [*_cells(memory, index, bar, format_bytes), *_cells(steps, index, bar, lambda size: f"{size:.3g} s")]
        table.add_row(*cells)
    return table


def _cells(
    rows: list[tuple[str, float, float]], index: int, width: int, text: Callable[[float], str]
) -> tuple[str, str, str]:
    """Name, size and bar of a row; no bar where the share is negative."""
    if index >= len(rows):
        return "", "", ""
    name, size, share = rows[index]
    if share < 0:
        return name, text(size), ""
    return name, text(size), f"[cyan]{'█' * round(share * width)}[/cyan]{'░' * (width - round(share * width))}"


def _alternatives(outcome: Outcome, console: Console) -> Table | Group:
    """One row per other way. A narrow terminal has no room for the time of a step, and a narrower one for a table."""
    table = _table("\nThe same tokens by other means")
    headings = ("memory", "step", "time", "cost", "break-even")
    shown = [index for index, name in enumerate(headings) if name != "step" or console.width >= NARROW]
    table.add_column("", no_wrap=True)
    table.add_column("cards", no_wrap=True)
    for index in shown:
        table.add_column(headings[index], justify="right", no_wrap=True)
    lines = []
    for item in outcome.alternatives:
        most = "" if item.candidate is not None else "up to "
        cells, cards = alternative_cells(item), f"{most}{item.cards} {item.card}"
        table.add_row(item.label, cards, *(cells[index] for index in shown))
        figures = ", ".join(f"{headings[index]} {cells[index]}".strip() for index in shown if cells[index])
        lines.append(f"- {item.label}, {cards}: {figures}")
    if not _fits(table, console):
        return Group(Text("\nThe same tokens by other means", style="bold"), *(Text(line) for line in lines))
    table.caption = "break-even: the B-F multiplier up to which layout 1 is cheaper"
    table.caption_justify = "left"
    return table


def _in_words(layout: Layout) -> str:
    in_blocks = f"in {layout.blocks} {'block' if layout.blocks == 1 else 'blocks'}"
    how = {"full": "in full", "offload": "in full with the optimizer on the host"}.get(layout.method, in_blocks)
    return f"{how}, {layout.precision.name}"


def _nothing_fits(outcome: Outcome, console: Console) -> None:
    over = outcome.fit.overflow
    console.print("\n[bold]Nothing fits.[/bold]", highlight=False)
    if over is not None:
        layout = over.layout
        rows = f"{layout.micro_rows} {'row' if layout.micro_rows == 1 else 'rows'} at a time"
        checkpointing = "with" if layout.checkpointing == "layers" else "without"
        console.print(
            f"The nearest layout (training {_in_words(layout)}, {rows}, {checkpointing} activation checkpointing) "
            f"needs {format_bytes(over.need)} of {over.what}, but there are {format_bytes(over.there)}. Its largest "
            f"part is: {over.part}.",
            highlight=False,
        )
    if outcome.change is None:
        console.print("No single change makes it fit.", highlight=False)
        return
    found = outcome.change.candidate
    cost = "" if found.dollars is None else f", {found.dollars}"
    console.print(
        f"It fits {outcome.change.words}: {_in_words(found.layout)}, {format_bytes(found.memory.peak)} per card, "
        f"{span(found.seconds)}{cost}.",
        highlight=False,
    )


def as_json(outcome: Outcome, verified: float | None) -> dict[str, Any]:
    """The plan as plain values: bytes, seconds, dollars as decimal text."""
    request, over = outcome.request, outcome.fit.overflow
    return {
        "model": {"name": request.spec.name, "parameters": request.spec.parameters},
        "card": request.card,
        "cards": request.cards,
        "tokens": request.tokens,
        "multiplier": asdict(request.multiplier),
        "price_usd_per_hour": None if outcome.price is None else str(outcome.price.usd_per_hour),
        "rates": asdict(request.rates),
        "layouts": [_candidate_json(outcome, item) for item in outcome.fit.candidates],
        "overflow": None
        if over is None
        else {"what": over.what, "part": over.part, "needs_bytes": over.need, "there_bytes": over.there},
        "nearest_change": None
        if outcome.change is None
        else {"change": outcome.change.words, **_candidate_json(outcome, outcome.change.candidate)},
        "alternatives": [
            {
                "label": item.label,
                "card": item.card,
                "cards": item.cards,
                "break_even_multiplier": item.break_even,
                "layout": None if item.candidate is None else _candidate_json(outcome, item.candidate),
            }
            for item in outcome.alternatives
        ],
        "assumptions": assumptions(outcome),
        "tracked_peak_bytes": verified,
    }


def _candidate_json(outcome: Outcome, item: Candidate) -> dict[str, Any]:
    layout = item.layout
    return {
        "method": layout.method,
        "blocks": layout.blocks,
        "precision": layout.precision.name,
        "micro_rows": layout.micro_rows,
        "pieces": layout.pieces,
        "largest": layout.largest,
        "moments": layout.moments,
        "state": layout.state,
        "frozen": layout.frozen,
        "loss_chunk": layout.loss_chunk,
        "checkpointing": layout.checkpointing,
        "cache": layout.cache,
        "data": layout.data,
        "pipeline": layout.pipeline,
        "shards": layout.shards,
        "peak_bytes": item.memory.peak,
        "memory_bytes": dict(item.memory.parts),
        "host_bytes": dict(item.memory.host),
        "disk_bytes": dict(item.memory.disk),
        "step_seconds": item.step.seconds,
        "step_parts_seconds": dict(item.step.parts),
        "steps": item.steps,
        "visit_steps": item.visit_steps,
        "tokens_per_second": item.tokens_per_second,
        "seconds": item.seconds,
        "usd": None if item.dollars is None else str(round(item.dollars.amount, 4)),
        "limit": binding(outcome, item),
    }

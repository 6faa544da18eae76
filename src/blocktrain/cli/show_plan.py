"""A plan in the terminal, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from blocktrain.plan.fit import Candidate
from blocktrain.plan.outcome import ABSENT, Outcome, assumptions, at_multipliers, binding, figures, money, savings, span
from blocktrain.units import format_bytes, format_count

MOST_ROWS = 8


def show(outcome: Outcome, console: Console, verified: float | None) -> None:
    """Layouts, the best one in parts, the alternatives, and what it all rests on."""
    request = outcome.request
    spec = request.spec
    console.print(
        f"[bold]{spec.name}[/bold]  {format_count(spec.parameters)} parameters on {request.cards} x {request.card}, "
        f"{format_count(request.tokens)} tokens",
        highlight=False,
    )
    if outcome.fit.candidates:
        console.print(_layouts(outcome, console.width))
        best = outcome.fit.candidates[0]
        if savings(best) != ABSENT:
            console.print(f"the first saves memory by: {savings(best)}", highlight=False)
        console.print(_parts(outcome, best, console.width))
        if verified is not None:
            share = best.memory.peak / verified - 1
            console.print(
                f"verified: the tracker finds a peak of {format_bytes(verified)}; the plan is {share:+.1%} off",
                highlight=False,
            )
        _multipliers(outcome, best, console)
    else:
        _nothing_fits(outcome, console)
    console.print(_alternatives(outcome))
    for line in assumptions(outcome):
        console.print(f"- {line}", style="dim", highlight=False)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))


def _layouts(outcome: Outcome, width: int) -> Table:
    """A row a layout; what matters less is left out of a narrow terminal."""
    table = _table("\nLayouts that fit, best first")
    columns = {
        "": lambda item: "",
        "blocks": lambda item: {"full": "full", "offload": "offl."}.get(item.layout.method, str(item.layout.blocks)),
        "precision": lambda item: item.layout.precision.name,
        "micro": lambda item: str(item.layout.micro_rows),
        "ckpt": lambda item: "yes" if item.layout.checkpointing == "layers" else ABSENT,
        "cache": lambda item: item.layout.cache if item.layout.cache != "off" else ABSENT,
        "dxpxs": lambda item: f"{item.layout.data}x{item.layout.pipeline}x{item.layout.shards}",
        "memory": lambda item: format_bytes(item.memory.peak).replace("iB", ""),
        "host": lambda item: format_bytes(item.memory.host_bytes).replace("iB", ""),
        "step": lambda item: f"{item.step.seconds:.3g}s",
        "tok/s": lambda item: format_count(round(item.tokens_per_second)),
        "time": lambda item: span(item.seconds),
        "cost": lambda item: money(item.dollars),
        "limit": lambda item: binding(outcome, item),
    }
    if width < 96:
        columns = {name: read for name, read in columns.items() if name not in ("host", "tok/s", "step")}
    if outcome.request.cards == 1:
        del columns["dxpxs"]
    left = ("", "precision", "cache", "ckpt", "limit")
    for heading in columns:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for number, item in enumerate(outcome.fit.candidates[:MOST_ROWS], 1):
        table.add_row(*(str(number) if name == "" else read(item) for name, read in columns.items()))
    if outcome.request.cards > 1:
        table.caption, table.caption_justify = "dxpxs: data-parallel ranks x pipeline stages x shards", "left"
    return table


def _parts(outcome: Outcome, best: Candidate, width: int) -> Table:
    """Memory at the worst moment and a step's time, side by side."""
    table = _table(f"\nThe first: memory at its peak ({best.memory.moment}), and a step")
    for justify in ("left", "right", "left", "left", "right", "left"):
        table.add_column(justify=justify)
    bar = max(8, min(24, (width - 60) // 2))
    room = outcome.request.room.card
    memory = [(name, size, size / room) for name, size in best.memory.parts.items() if size >= 0.5]
    seconds = best.step.seconds
    steps = [(name, size, size / seconds) for name, size in best.step.parts.items() if size > 0]
    steps.append(("in all", seconds, 1.0))
    memory.append(("in all", best.memory.peak, best.memory.peak / room))
    memory += [(f"host: {name}", size, -1.0) for name, size in best.memory.host.items()]
    memory += [(f"disk: {name}", size, -1.0) for name, size in best.memory.disk.items()]
    for index in range(max(len(memory), len(steps))):
        cells = [*_cells(memory, index, bar, format_bytes), *_cells(steps, index, bar, lambda size: f"{size:.3g} s")]
        table.add_row(*cells)
    return table


def _cells(rows: list[tuple[str, float, float]], index: int, width: int, text: Any) -> tuple[str, str, str]:
    if index >= len(rows):
        return "", "", ""
    name, size, share = rows[index]
    if share < 0:
        return name, text(size), ""
    return name, text(size), f"[cyan]{'█' * round(share * width)}[/cyan]{'░' * (width - round(share * width))}"


def _multipliers(outcome: Outcome, best: Candidate, console: Console) -> None:
    if best.layout.blocks == 1 or best.dollars is None:
        return
    own = outcome.request.multiplier.value
    told = [f"{value:g} ({name}): {usd}" for name, value, usd in at_multipliers(best, own)]
    step = best.step_dollars
    cents = "" if step is None else f"a step costs ${float(step.amount):.2g}; "
    console.print(f"\n{cents}to the same loss at a multiplier of " + ", ".join(told), highlight=False)


def _alternatives(outcome: Outcome) -> Table:
    table = _table("\nThe same tokens by other means")
    for heading in ("", "cards"):
        table.add_column(heading, no_wrap=True)
    for heading in ("memory", "step", "time", "cost", "BCD cheaper up to"):
        table.add_column(heading, justify="right")
    for item in outcome.alternatives:
        up_to = "" if item.candidate is not None else "up to "
        table.add_row(item.label, f"{up_to}{item.cards} {item.card}", *figures(item))
    return table


def _nothing_fits(outcome: Outcome, console: Console) -> None:
    over = outcome.fit.overflow
    console.print("\n[bold]Nothing fits.[/bold]", highlight=False)
    if over is not None:
        layout = over.layout
        console.print(
            f"Nearest: {layout.method}, {layout.blocks} block(s), {layout.precision.name}, {layout.micro_rows} row(s) "
            f"at a time, checkpointing {layout.checkpointing}: needs {format_bytes(over.need)} of {over.what}, there "
            "are "
            f"{format_bytes(over.there)}; its largest part is {over.part}.",
            highlight=False,
        )
    if outcome.change is None:
        console.print("No single change makes it fit.", highlight=False)
        return
    found = outcome.change.candidate
    console.print(
        f"It fits {outcome.change.words}: {found.layout.blocks} block(s), {found.layout.precision.name}, "
        f"{format_bytes(found.memory.peak)} a card, {span(found.seconds)}, {money(found.dollars)}.",
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
        "rates": {**asdict(request.rates)},
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

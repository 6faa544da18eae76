"""The parts of a step's memory: their order, their colours, and bars that stack them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from blocktrain.records.run_records import Bytes
from blocktrain.report.chart import Bar, stacked_bars
from blocktrain.units import format_bytes

PART_ORDER = ("weights", "master", "gradients", "moments", "activations")  # as they are stacked


def parts_of(*memories: Bytes | None) -> list[str]:
    """Names of the parts of memory that occur: the known ones in the order they are stacked, then all others."""
    found = {part for memory in memories if memory for part in memory}
    return [part for part in PART_ORDER if part in found] + sorted(found.difference(PART_ORDER))


def memory_bars(memories: Sequence[tuple[str, Bytes]], *, css: str = "", strong: str = "") -> str:
    """A bar for each of the labelled `memories`, all on one scale, under a key; the bar `strong` stands out."""
    parts = parts_of(*(memory for _, memory in memories))
    limit = max(sum(memory.values()) for _, memory in memories) or 1
    bars = [
        Bar(
            label=label,
            pieces=[
                (memory.get(part, 0), part_colour(part), f"{part}: {format_bytes(memory.get(part, 0))}")
                for part in parts
            ],
            text=format_bytes(sum(memory.values())),
            strong=label == strong,
        )
        for label, memory in memories
    ]
    chart = stacked_bars(bars, limit, label="memory of a step by part", row_height=26 if len(bars) <= 16 else 16)
    return f'{parts_key(parts)}<div class="bars {css}">{chart}</div>'


def parts_key(parts: Sequence[str]) -> str:
    """The colours of `parts` and their names, as a list."""
    items = "".join(f'<li><i class="swatch {part_colour(part)}"></i>{escape(part)}</li>' for part in parts)
    return f'<ul class="key">{items}</ul>'


def part_colour(part: str) -> str:
    """The class that carries the part's colour; parts without a colour of their own share the last one."""
    return f"p{PART_ORDER.index(part) if part in PART_ORDER else len(PART_ORDER)}"

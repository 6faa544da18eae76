"""The figures of runs as a table: a column for each run, or one run, full training, and what the run saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from blocktrain.records.run_records import Bytes
from blocktrain.report.format import ABSENT, agree, decimal, flops_text, format_small, percent, seconds_text
from blocktrain.report.memory_parts import parts_of
from blocktrain.report.summary import Summary
from blocktrain.units import format_bytes, format_count, format_seconds

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One quantity: its name, and a cell for each run (or for this run, for full training, and for the saving)."""

    label: str
    cells: tuple[str, ...]


def columns(summaries: Sequence[Summary]) -> list[str]:
    """Headings of the table's columns after the first."""
    if len(summaries) == 1:
        return ["this run"] if summaries[0].is_full else ["this run", "full training", "saved"]
    return [item.name for item in summaries]


def rows(summaries: Sequence[Summary]) -> list[Row]:
    """The table's rows; a quantity that no run has is left out."""
    shown = _Shown(summaries)
    every = [*_results(shown), *_flops(shown), *_cache(shown), *_memory(shown), *_progress(shown)]
    return [row for row in every if any(cell != ABSENT for cell in row.cells[: len(summaries)])]


def table(summaries: Sequence[Summary]) -> Table:
    """The table for a terminal. Raises `ValueError` for no summaries."""
    if not summaries:
        raise ValueError("a table needs the summary of at least one run")
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    result.add_column("", no_wrap=True)
    for heading in columns(summaries):
        result.add_column(Text(heading), justify="right")  # Text: a name may hold what looks like markup
    for row in rows(summaries):
        result.add_row(Text(row.label), *(Text(cell) for cell in row.cells))
    return result


@dataclass(frozen=True)
class _Shown:
    """The summaries that the table shows."""

    summaries: Sequence[Summary]

    @property
    def is_beside_full(self) -> bool:
        """Whether a single run is compared with what full training would cost."""
        return len(self.summaries) == 1 and not self.summaries[0].is_full

    def row(
        self, label: str, read: Callable[[Summary], T | None], show: Callable[[T], str], full: T | None = None
    ) -> Row:
        """The row of the quantity that `read` takes from a summary. `full` is full training's value of it; beside that
        stands the share that the run saved, unless the two are equal."""
        values = [read(item) for item in self.summaries]
        cells = [ABSENT if value is None else show(value) for value in values]
        if self.is_beside_full:
            value = values[0]
            cells += ["" if full is None else show(full), ""]
            if isinstance(value, int | float) and isinstance(full, int | float) and full and value != full:
                cells[-1] = percent(1 - value / full)
        return Row(label, tuple(cells))


def _results(shown: _Shown) -> Iterator[Row]:
    row = shown.row
    if not shown.is_beside_full:
        yield row("method", lambda item: item.method, str)
    yield row("model", lambda item: item.model, str)
    yield row("parameters", lambda item: item.parameters, format_count)
    yield row("blocks", lambda item: item.blocks, str)
    losses = [(item.validation_loss, item.validation_loss_per_byte) for item in shown.summaries]
    if not all(loss is None or (per_byte is not None and agree(loss, per_byte)) for loss, per_byte in losses):
        unit = shown.summaries[0].unit.removesuffix("s")
        yield row(f"validation loss, nats per {unit}", lambda item: item.validation_loss, decimal)
    yield row("validation loss, nats per byte", lambda item: item.validation_loss_per_byte, decimal)
    yield row("validation accuracy", lambda item: item.accuracy, percent)
    yield row("exact match", lambda item: item.exact_match, percent)
    yield row("  before training", lambda item: item.exact_match_before, percent)


def _flops(shown: _Shown) -> Iterator[Row]:
    """What a step and the run cost. The formula knows no cache, so it is compared with the uncached count."""
    row, first = shown.row, shown.summaries[0]
    cached = any(item.cache_rows is not None for item in shown.summaries)
    whole = "whole model" if any(item.layers_left_out for item in shown.summaries) else "uncached" if cached else ""
    formula, excess = "of a full step, by the formula", "counted beyond the formula"
    if whole:
        formula, excess = f"by the formula, {whole}", f"beyond the formula, {whole}"
    yield row("FLOPs per step, mean of blocks", lambda item: item.flops_mean_step, flops_text, first.flops_full_step)
    yield row("  of a full step, counted", lambda item: item.flops_ratio, decimal, 1.0)
    if whole:
        yield row(f"  of a full step, {whole}", lambda item: item.flops_ratio_uncached, decimal, 1.0)
    yield row(f"  {formula}", lambda item: item.flops_ratio_theory, decimal, 1.0)
    yield row(f"  {excess}", lambda item: item.flops_excess_percent, lambda value: percent(value / 100))
    yield row("FLOPs in total" if first.finished else "FLOPs so far", lambda item: item.flops, flops_text)
    yield row("  uncached", lambda item: item.flops_uncached, flops_text)
    yield row("  saved by the prefix cache", _flops_saved, str)


def _cache(shown: _Shown) -> Iterator[Row]:
    """What the prefix cache stored and did, where a visit was cached."""
    row = shown.row
    yield row("prefix cache", lambda item: item.cache_places, ", ".join)
    yield row("  stored as", _stored_as, str)
    yield row("  stored at most", lambda item: item.cache_bytes, format_bytes)
    yield row("  rows requested", lambda item: item.cache_rows, format_count)
    yield row("  found stored", lambda item: item.cache_hit_rate, percent)
    yield row("  time filling it", lambda item: item.cache_fill_seconds, seconds_text)
    yield row("  time waiting for it", lambda item: item.cache_wait_seconds, seconds_text)
    yield row("  time saved, estimated", lambda item: item.cache_seconds_saved, seconds_text)


def _memory(shown: _Shown) -> Iterator[Row]:
    row, first = shown.row, shown.summaries[0]
    largest = "" if all(item.is_full for item in shown.summaries) else ", largest block"
    full = first.memory_full or {}
    yield row(f"optimizer state{largest}", lambda item: item.optimizer_bytes, format_bytes, first.optimizer_bytes_full)
    yield row(f"memory of a step{largest}", lambda item: _total(item.memory), format_bytes, _total(first.memory_full))
    for part in parts_of(*(item.memory for item in shown.summaries), full if shown.is_beside_full else None):
        yield row(f"  {part}", lambda item, part=part: _size(item.memory, part), format_bytes, full.get(part, 0))
    yield row("optimizer state, measured", lambda item: item.optimizer_bytes_measured, format_bytes)
    if all(item.device == "cuda" for item in shown.summaries):
        yield row("peak memory, measured", lambda item: item.peak_memory_bytes, format_bytes)
    elif len(shown.summaries) == 1:  # it never falls, so of several runs in one process it says nothing of the later
        yield row("resident set, with PyTorch", lambda item: item.peak_memory_bytes, format_bytes)


def _progress(shown: _Shown) -> Iterator[Row]:
    row, unit = shown.row, shown.summaries[0].unit
    yield row(f"{unit} seen", lambda item: item.tokens, format_count)
    yield row("steps", lambda item: item.steps, "{:,}".format)
    yield row("visits", lambda item: None if item.is_full else item.visits, str)
    yield row("wall time", lambda item: item.seconds, format_seconds)
    yield row(
        f"{unit} per second",
        lambda item: item.tokens_per_second,
        lambda rate: f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}",
    )


def _flops_saved(item: Summary) -> str | None:
    if item.flops_saved is None:
        return None
    share = item.flops_saved_share
    return flops_text(item.flops_saved) + ("" if share is None else f", {percent(share)}")


def _stored_as(item: Summary) -> str | None:
    if item.cache_dtypes is None:
        return None
    error = item.cache_encoding_error
    return ", ".join(item.cache_dtypes) + (f", relative error {format_small(error)}" if error else "")


def _total(memory: Bytes | None) -> int | None:
    return None if memory is None else sum(memory.values())


def _size(memory: Bytes | None, part: str) -> int | None:
    return None if memory is None else memory.get(part, 0)

"""The figures of a run, as plain data for machines and as a table for people.

Estimates and measurements are named apart: `flops_*` are counted by the profiler, `flops_ratio_theory` is the
formula's, which knows no cache; `optimizer_bytes` and `memory` are the cost record's, `optimizer_bytes_measured` and
`peak_memory_bytes` what the run found; `cache_seconds_saved` is estimated, all else about the cache measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from blocktrain.report.cache import totals
from blocktrain.report.format import ABSENT, alike, decimal, flops_text, format_small, percent, seconds_text
from blocktrain.report.records import Bytes
from blocktrain.report.run import RunRecord
from blocktrain.units import format_bytes, format_count, format_seconds

Summary = dict[str, Any]

PART_ORDER = ("weights", "master", "gradients", "optimizer", "activations")


def summaries_of(runs: Sequence[RunRecord]) -> list[Summary]:
    """Those of runs that stand side by side: names are numbered where two are the same."""
    names: list[str] = []
    for run in runs:
        name = alone = run.header.name or run.folder.name
        count = 2
        while name in names:
            name, count = f"{alone} ({count})", count + 1
        names.append(name)
    return [{**summary(run), "name": name} for run, name in zip(runs, names, strict=True)]


def summary(run: RunRecord) -> Summary:
    """What the run reached and what it cost, JSON-able; None for what the log does not tell or is not finite.

    Losses are in nats: `validation_loss` per token (image), `validation_loss_per_byte` per byte of text.
    `flops_ratio` is one step averaged over the blocks, each counting once, over a full step; what a prefix cache
    saved is taken off, but for `*_uncached` and `flops_excess_percent`. `optimizer_bytes` and `memory` are the cost
    record's, for the largest block. `flops_saved*` and `cache_*` are None where no visit was cached.
    """
    last = run.evaluations[-1] if run.evaluations else None
    final = run.end or last
    loss = _first_known(run.end and run.end.loss, last and last.loss)
    return {
        "name": run.header.name,
        "method": run.header.method,
        "model": run.header.model,
        "parameters": run.header.parameters,
        "blocks": 1 if run.is_full else len(run.header.blocks),
        "unit": run.header.unit,
        "finished": run.end is not None,
        "reason": run.end.reason if run.end else None,
        "validation_loss": loss,
        "validation_loss_per_byte": _first_known(final and final.loss_per_byte, last and last.loss_per_byte),
        "accuracy": _first_known(final and final.accuracy, last and last.accuracy),
        "exact_match": _first_known(final and final.exact_match, last and last.exact_match),
        "exact_match_before": _first_known(run.evaluations[0].exact_match if run.evaluations else None),
        **_flops(run),
        **_cache(run),
        **_memory(run),
        "steps": run.steps_done,
        "visits": len(run.visits),
        "tokens": run.tokens,
        "seconds": run.seconds,
        "tokens_per_second": run.tokens / run.seconds if run.seconds > 0 else None,
        "skipped_steps": sum(row.skipped for row in run.steps),
        "nonfinite_steps": sum(not math.isfinite(row.loss) for row in run.steps),
    }


def _first_known(*values: float | None) -> float | None:
    known = next((value for value in values if value is not None), None)
    return known if known is not None and math.isfinite(known) else None


def _flops(run: RunRecord) -> Summary:
    cost = run.cost
    if cost is None:
        names = ("flops_full_step", "flops_mean_step", "flops_mean_step_uncached", "flops_ratio")
        more = ("flops_ratio_uncached", "flops_ratio_theory", "flops_excess_percent", "layers_left_out")
        return dict.fromkeys((*names, *more, "flops", "flops_uncached", "flops_saved", "flops_saved_share"), None)
    counted = [cost.flops_full] if run.is_full else list(cost.flops_blocks) or [cost.flops_full]
    formula = [cost.theory_full] if run.is_full else list(cost.theory_blocks) or [cost.theory_full]
    uncached = sum(counted) / len(counted)
    mean = sum(run.mean_step_flops(block) for block in range(len(counted))) / len(counted)
    ratio = uncached / cost.flops_full if cost.flops_full else None
    theory = sum(formula) / len(formula) / cost.theory_full if cost.theory_full else None
    return {
        "flops_full_step": cost.flops_full,
        "flops_mean_step": mean,
        "flops_mean_step_uncached": uncached,
        "flops_ratio": mean / cost.flops_full if cost.flops_full else None,
        "flops_ratio_uncached": ratio,
        "flops_ratio_theory": theory,
        "flops_excess_percent": 100 * (ratio / theory - 1) if ratio and theory else None,
        "layers_left_out": max((visit.left_out for visit in run.visits), default=0),
        **_flops_in_all(run),
    }


def _flops_in_all(run: RunRecord) -> Summary:
    """FLOPs of the run so far, and what they would be without the cache that it used."""
    spent, uncached = run.flops_until(run.steps_done), run.uncached_flops_until(run.steps_done)
    if not run.cache_uses:
        return {"flops": spent, **dict.fromkeys(("flops_uncached", "flops_saved", "flops_saved_share"), None)}
    saved = uncached - spent
    share = saved / uncached if uncached else None
    return {"flops": spent, "flops_uncached": uncached, "flops_saved": saved, "flops_saved_share": share}


def _cache(run: RunRecord) -> Summary:
    """What the prefix cache did over the run."""
    if not run.cache_uses:
        names = ("places", "dtypes", "bytes", "rows", "hit_rate", "stale", "damaged", "fill_seconds", "wait_seconds")
        return {f"cache_{name}": None for name in (*names, "seconds_saved", "encoding_error")}
    did = totals(run.cache_uses)
    return {
        "cache_places": list(did.places),
        "cache_dtypes": list(did.dtypes),
        "cache_bytes": did.bytes,
        "cache_rows": did.rows,
        "cache_hit_rate": did.hit_rate,
        "cache_stale": did.stale,
        "cache_damaged": did.damaged,
        "cache_fill_seconds": _first_known(did.fill_seconds),
        "cache_wait_seconds": _first_known(did.wait_seconds),
        "cache_seconds_saved": _first_known(did.seconds_saved),
        "cache_encoding_error": _first_known(did.encoding_error),
    }


def _memory(run: RunRecord) -> Summary:
    measured: Summary = {
        "optimizer_bytes_measured": run.end.optimizer_bytes if run.end else None,
        "peak_memory_bytes": run.end.peak_memory_bytes if run.end else None,
        "device": run.header.device,
    }
    if run.cost is None:
        names = ("optimizer_bytes", "optimizer_bytes_full", "memory", "memory_full")
        return {**dict.fromkeys(names, None), **measured}
    full = run.cost.memory_full
    blocks = [full] if run.is_full else list(run.cost.memory_blocks) or [full]
    return {
        "optimizer_bytes": max(block.get("optimizer", 0) for block in blocks),
        "optimizer_bytes_full": full.get("optimizer", 0),
        "memory": dict(max(blocks, key=lambda block: sum(block.values()))),
        "memory_full": dict(full),
        **measured,
    }


def parts(*memories: Bytes | None) -> list[str]:
    """Names of the parts of memory that occur, known ones first in the order they are stacked."""
    found = {part for memory in memories if memory for part in memory}
    return [part for part in PART_ORDER if part in found] + sorted(found.difference(PART_ORDER))


@dataclass(frozen=True)
class Row:
    """One quantity: its name and how it reads for each run (or for this run, full training, and the saving)."""

    label: str
    cells: tuple[str, ...]


def columns(summaries: Sequence[Summary]) -> list[str]:
    """Headings of the table's columns after the first."""
    if len(summaries) == 1:
        return ["this run"] if summaries[0]["method"] == "full" else ["this run", "full training", "saved"]
    return [item["name"] for item in summaries]


def rows(summaries: Sequence[Summary]) -> list[Row]:
    """The table's rows; a quantity that no run knows is left out."""
    first = summaries[0]
    alone = len(summaries) == 1 and first["method"] != "full"
    unit = first["unit"]
    result: list[Row] = []

    def add(label: str, read: Callable[[Summary], Any], show: Callable[[Any], str], full: Any = None) -> None:
        found = [read(item) for item in summaries]
        if all(value is None for value in found):
            return
        cells = [ABSENT if value is None else show(value) for value in found]
        if alone and full is not None:
            saved = percent(1 - found[0] / full) if full and isinstance(found[0], int | float) else ""
            cells += [show(full), saved if found[0] != full else ""]
        elif alone:
            cells += ["", ""]
        result.append(Row(label, tuple(cells)))

    if not alone:
        add("method", lambda item: item["method"], str)
    add("model", lambda item: item["model"], str)
    add("parameters", lambda item: item["parameters"], format_count)
    add("blocks", lambda item: item["blocks"], str)
    if not all(map(_a_token_is_a_byte, summaries)):
        add(f"validation loss, nats per {unit.removesuffix('s')}", _of("validation_loss"), decimal)
    add("validation loss, nats per byte", _of("validation_loss_per_byte"), decimal)
    add("validation accuracy", lambda item: item["accuracy"], percent)
    add("exact match", lambda item: item["exact_match"], percent)
    add("  before training", lambda item: item["exact_match_before"], percent)
    _flops_rows(add, summaries)
    _cache_rows(add)
    largest = "" if all(item["method"] == "full" for item in summaries) else ", largest block"
    add(f"optimizer state{largest}", _of("optimizer_bytes"), format_bytes, first["optimizer_bytes_full"])
    add(f"memory of a step{largest}", lambda item: _total(item["memory"]), format_bytes, _total(first["memory_full"]))
    for part in parts(*(item["memory"] for item in summaries), first["memory_full"] if alone else None):
        full = (first["memory_full"] or {}).get(part, 0)
        add(f"  {part}", lambda item, part=part: _part(item["memory"], part), format_bytes, full)
    add("optimizer state, measured", _of("optimizer_bytes_measured"), format_bytes)
    if all(item["device"] == "cuda" for item in summaries):
        add("peak memory, measured", _of("peak_memory_bytes"), format_bytes)
    elif len(summaries) == 1:  # never falls, so of several runs in one process it says nothing
        add("resident set, PyTorch included", _of("peak_memory_bytes"), format_bytes)
    add(f"{unit} seen", _of("tokens"), format_count)
    add("steps", _of("steps"), lambda value: f"{value:,}")
    add("visits", lambda item: item["visits"] if item["method"] != "full" else None, str)
    add("wall time", _of("seconds"), format_seconds)
    add(f"{unit} per second", _of("tokens_per_second"), _rate)
    return result


Add = Callable[..., None]  # (label, read, show, full training's value) appends a row


def _flops_rows(add: Add, summaries: Sequence[Summary]) -> None:
    """What a step and the run cost; the formula knows no cache, so it is compared with the uncached count."""
    first, cached = summaries[0], any(item["cache_rows"] is not None for item in summaries)
    whole = "whole model" if any(item["layers_left_out"] for item in summaries) else "uncached" if cached else ""
    add("FLOPs per step, mean of blocks", _of("flops_mean_step"), flops_text, first["flops_full_step"])
    add("  of a full step, counted", _of("flops_ratio"), decimal, 1.0)
    if whole:
        add(f"  of a full step, {whole}", _of("flops_ratio_uncached"), decimal, 1.0)
    formula, beyond = "of a full step, by the formula", "counted beyond the formula"
    if whole:
        formula, beyond = f"by the formula, {whole}", f"beyond the formula, {whole}"
    add(f"  {formula}", _of("flops_ratio_theory"), decimal, 1.0)
    add(f"  {beyond}", _of("flops_excess_percent"), lambda value: percent(value / 100))
    add("FLOPs so far" if not first["finished"] else "FLOPs in all", _of("flops"), flops_text)
    add("  uncached", _of("flops_uncached"), flops_text)
    add("  saved by the prefix cache", _saved, str)


def _cache_rows(add: Add) -> None:
    """What the prefix cache held and did, where a visit was cached."""
    add("prefix cache", _of("cache_places"), ", ".join)
    add("  stored as", _tensors_behind, str)
    add("  stored at most", _of("cache_bytes"), format_bytes)
    add("  rows asked for", _of("cache_rows"), format_count)
    add("  found stored", _of("cache_hit_rate"), percent)
    add("  filling", _of("cache_fill_seconds"), seconds_text)
    add("  steps waiting", _of("cache_wait_seconds"), seconds_text)
    add("  time saved, estimated", _of("cache_seconds_saved"), seconds_text)


def _a_token_is_a_byte(item: Summary) -> bool:
    """Whether the losses per token and per byte agree to three digits, so that one of them tells all."""
    loss, per_byte = item["validation_loss"], item["validation_loss_per_byte"]
    return loss is None or (per_byte is not None and alike(loss, per_byte))


def _saved(item: Summary) -> str | None:
    if item["flops_saved"] is None:
        return None
    share = item["flops_saved_share"]
    return flops_text(item["flops_saved"]) + ("" if share is None else f", {percent(share)}")


def _tensors_behind(item: Summary) -> str | None:
    if item["cache_dtypes"] is None:
        return None
    error = item["cache_encoding_error"]
    return ", ".join(item["cache_dtypes"]) + (f", relative error {format_small(error)}" if error else "")


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _of(name: str) -> Callable[[Summary], Any]:
    return lambda item: item[name]


def _total(memory: Bytes | None) -> int | None:
    return None if memory is None else sum(memory.values())


def _part(memory: Bytes | None, part: str) -> int | None:
    return None if memory is None else memory.get(part, 0)


def table(summaries: Sequence[Summary]) -> Table:
    """The figures for a terminal: one column a run; for a single run, what full training would be beside it.

    Raises `ValueError` for no summaries.
    """
    if not summaries:
        raise ValueError("a table needs the summary of at least one run")
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    result.add_column("", no_wrap=True)
    for heading in columns(summaries):
        result.add_column(Text(heading), justify="right")  # Text: a name may hold what looks like markup
    for row in rows(summaries):
        result.add_row(Text(row.label), *(Text(cell) for cell in row.cells))
    return result

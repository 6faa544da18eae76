"""The prefix cache: what it did by block, what it saved in total, and why it was used or not."""

from __future__ import annotations

from html import escape

from blocktrain.report.cache_totals import CacheTotals, abandoned, by_block, reasons, totals
from blocktrain.report.format import ABSENT, flops_text, format_small, percent, plural, seconds_text
from blocktrain.report.run import RunRecord
from blocktrain.report.section import Section, table
from blocktrain.units import format_bytes, format_count

HEADINGS = (
    "block", "visits", "where", "stored", "rows requested", "hit rate", "fill", "wait", "FLOPs saved", "time saved"
)  # fmt: skip
ENCODINGS = {"compute": "as computed", "bf16": "in bf16", "int8": "in int8 with a scale for each token"}


def _html(run: RunRecord) -> str:
    done = ""
    if run.cache_uses:
        rows = [_row(str(block), figures) for block, figures in by_block(run.cache_uses).items()]
        done = table(HEADINGS, rows, total=_row("all", totals(run.cache_uses)))
    items = ""
    for reason in reasons(run.cache_decisions):  # the lowest block has no prefix, so its visits are not listed
        often, place = plural(reason.visits, "visit"), reason.place or "not cached"
        often += "" if reason.text.startswith(f"{place}:") else f", {place}"
        differ = " (the first of these visits; the figures of the others differ)" if reason.figures_differ else ""
        items += f"<li><span>{escape(often)}</span> {escape(reason.text)}{differ}</li>"
    return done + (f'<ul class="reasons">{items}</ul>' if items else "")


def _note(run: RunRecord) -> str:
    text = "the outputs of the frozen layers below the active block, stored once and read again. "
    text += _totals_in_words(run, totals(run.cache_uses)) if run.cache_uses else "No visit was cached to its end. "
    if count := abandoned(run):
        text += f"In {plural(count, 'visit')} the cache was abandoned half-way, and training continued without it. "
    return text


def _totals_in_words(run: RunRecord, figures: CacheTotals) -> str:
    spent, uncached = run.flops_until(run.steps_done), run.uncached_flops_until(run.steps_done)
    text = ""
    if uncached:
        text = f"The run cost {flops_text(spent)} instead of {flops_text(uncached)}"
        text += f" ({percent(1 - spent / uncached)} saved). " if spent <= uncached else ". "
        if uncached - spent != figures.flops_saved:
            text += "This includes what visits saved before they were interrupted; the table does not. "
    text += f"Stored {', '.join(ENCODINGS.get(dtype, dtype) for dtype in figures.dtypes)}"
    text += f", relative error {format_small(figures.encoding_error)}. " if figures.encoding_error else ". "
    for count, what in ((figures.stale, "stale"), (figures.damaged, "damaged")):
        text += f"{plural(count, f'{what} row')} rejected. " if count else ""
    return text + (
        "The time saved is an estimate: the FLOPs saved, at the rate measured on the prefix, less the time spent "
        "waiting for the cache. "
    )


def _row(label: str, figures: CacheTotals) -> list[str]:
    return [
        label,
        f"{figures.visits:,}",
        ", ".join(figures.places),
        format_bytes(figures.bytes),
        format_count(figures.rows),
        ABSENT if figures.hit_rate is None else percent(figures.hit_rate),
        seconds_text(figures.fill_seconds),
        seconds_text(figures.wait_seconds),
        flops_text(figures.flops_saved),
        seconds_text(figures.seconds_saved),
    ]


PREFIX_CACHE = Section(
    title="Prefix cache",
    note=_note,
    html=_html,
    condition=lambda run: bool(run.cache_decisions or run.cache_uses),
    in_comparison=True,
)

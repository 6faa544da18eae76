"""The page's section on the prefix cache: what it did by block, what it saved in all, and why it was used or not."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from blocktrain.report.cache import CacheTotals, Reason, by_block, given_up, reasons, totals
from blocktrain.report.figures import figure
from blocktrain.report.format import ABSENT, flops_text, format_small, percent, plural, seconds_text
from blocktrain.report.run import RunRecord
from blocktrain.units import format_bytes, format_count

HEADINGS = (
    "block", "visits", "where", "stored", "rows asked", "hit rate", "fill", "wait", "FLOPs saved", "time saved"
)  # fmt: skip


def section(run: RunRecord, name: str) -> str:
    """The section, `name` in its title where there are several runs; nothing where the log has no word of a cache."""
    if not run.cache_choices and not run.cache_uses:
        return ""
    title = "Prefix cache" + (f" of {name}" if name else "")
    return figure(title, _note(run), _blocks(run), _reasons(reasons(run.cache_choices)))


def _note(run: RunRecord) -> str:
    said = "what the frozen layers below the active block put out, stored once and read again. "
    lost = given_up(run)
    if not run.cache_uses:
        said += "No visit has been cached to its end. "
    else:
        said += _in_all(run, totals(run.cache_uses))
    if lost:
        said += f"In {plural(lost, 'visit')} it was given up half-way, and training went on without. "
    return said


def _in_all(run: RunRecord, did: CacheTotals) -> str:
    spent, uncached = run.flops_until(run.steps_done), run.uncached_flops_until(run.steps_done)
    said = ""
    if uncached:
        said = f"The run cost {flops_text(spent)} instead of {flops_text(uncached)}"
        said += f" ({percent(1 - spent / uncached)} saved). " if spent <= uncached else ". "
        if uncached - spent != did.flops_saved:
            said += "That counts also what visits saved before they were interrupted, which the table does not. "
    stored = {"compute": "as computed", "bf16": "in bf16", "int8": "in int8 with a scale for each token"}
    said += f"Stored {', '.join(stored.get(dtype, dtype) for dtype in did.dtypes)}"
    said += f", relative error {format_small(did.encoding_error)}. " if did.encoding_error else ". "
    for count, what in ((did.stale, "stale"), (did.damaged, "damaged")):
        said += f"{plural(count, f'{what} row')} refused. " if count else ""
    return said + "Time saved is estimated: the FLOPs at the rate measured on the prefix, less the waiting."


def _blocks(run: RunRecord) -> str:
    if not run.cache_uses:
        return ""
    headings = "".join(f'<th scope="col">{escape(text)}</th>' for text in HEADINGS)
    body = "".join(_row(str(block), did) for block, did in by_block(run.cache_uses).items())
    return (
        f'<div class="scroll"><table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody>'
        f"<tfoot>{_row('all', totals(run.cache_uses))}</tfoot></table></div>"
    )


def _row(label: str, did: CacheTotals) -> str:
    cells = (
        f"{did.visits:,}",
        ", ".join(did.places),
        format_bytes(did.bytes),
        format_count(did.rows),
        ABSENT if did.hit_rate is None else percent(did.hit_rate),
        seconds_text(did.fill_seconds),
        seconds_text(did.wait_seconds),
        flops_text(did.flops_saved),
        seconds_text(did.seconds_saved),
    )
    columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(label)}</th>{columns}</tr>\n'


def _reasons(found: Sequence[Reason]) -> str:
    """Where each visit stored its prefix and why; a visit at the bottom has no prefix and is not among them."""
    items = "".join(
        f"<li><span>{escape(_how_often(reason))}</span> {escape(reason.text)}"
        f"{' (the first of them; figures vary)' if reason.figures_differ else ''}</li>"
        for reason in found
    )
    return f'<ul class="reasons">{items}</ul>' if items else ""


def _how_often(reason: Reason) -> str:
    place = reason.place or "not cached"
    often = plural(reason.visits, "visit")
    return often if reason.text.startswith(f"{place}:") else f"{often}, {place}"

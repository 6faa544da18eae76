"""The page's section on tracked memory: the parts that were alive at the worst moment of each block's step."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from blocktrain.report.figures import figure
from blocktrain.report.format import ABSENT
from blocktrain.report.records import Peak
from blocktrain.report.run import RunRecord
from blocktrain.units import format_bytes

ORDER = ("frozen", "active", "master", "gradients", "moments", "activations", "logits")  # what is left is "other"


def section(run: RunRecord, name: str) -> str:
    """The section, `name` in its title where there are several runs; nothing where the log has no peaks.

    A column that no row has anything to say in is left out.
    """
    if run.tracked is None:
        return ""
    title = "Memory by part, tracked" + (f" of {name}" if name else "")
    headings = ("peak", "measured", *ORDER, "other", "cache", "on the host", "worst at")
    if run.is_full:
        rows = {"full training": _cells(run.tracked.full, None, _measured(run, 0))}
    else:
        rows = {"full training": _cells(run.tracked.full, None, None)}
        for index, peak in enumerate(run.tracked.blocks):
            rows[f"block {index}"] = _cells(peak, _cached(run, index), _measured(run, index))
    kept = [at for at in range(len(headings)) if any(cells[at] != ABSENT for cells in rows.values())]
    head = "".join(f'<th scope="col">{escape(headings[at])}</th>' for at in kept)
    body = "".join(_row(label, [cells[at] for at in kept]) for label, cells in rows.items())
    table = f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return figure(title, _note(run), table)


def _note(run: RunRecord) -> str:
    said = (
        "the worst moment of a visit, run on a copy without memory before the first step: bytes of the tensors alive "
        "then. What frozen blocks left on the host and what a prefix cache stored lie beside it. Measured: the most "
        "that PyTorch allocated on a GPU in the block's visits, or the process's resident set on a CPU, which holds "
        "Python and its libraries too and never shrinks. "
    )
    if run.header.layout != "data":
        said += (
            f"Tracked for one process with the whole model; with layout '{run.header.layout}' each of several holds "
            "less, and the measured column is of the first. "
        )
    return said + (f"Micro-batches: {run.micro_batch.reason}." if run.micro_batch else "")


def _cells(peak: Peak, cached: int | None, measured: int | None) -> list[str]:
    known = [peak.parts.get(part, 0) for part in ORDER]
    total = sum(peak.parts.values())
    counts = [total, measured, *known, total - sum(known), cached, peak.host_bytes]
    texts = [format_bytes(count) if count else ABSENT for count in counts]
    return [*texts, peak.operation.removeprefix("aten.").removesuffix(".default") or ABSENT]


def _row(label: str, cells: Sequence[str]) -> str:
    columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape(label)}</th>{columns}</tr>\n'


def _cached(run: RunRecord, block: int) -> int | None:
    return max((use.bytes for use in run.cache_uses if use.block == block and use.place != "file"), default=None)


def _measured(run: RunRecord, block: int) -> int | None:
    found = [row.peak_memory_bytes for row in run.retirements if row.block == block and row.peak_memory_bytes]
    return max(found, default=None)

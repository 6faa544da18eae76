"""Tracked memory: the tensors, by part, that are alive at the worst moment of each block's step."""

from __future__ import annotations

from blocktrain.records.run_records import PeakMemory
from blocktrain.report.format import ABSENT
from blocktrain.report.run import RunRecord
from blocktrain.report.section import Section, table
from blocktrain.units import format_bytes

ORDER = ("frozen", "active", "master", "gradients", "moments", "activations", "logits")  # what is left is "other"
HEADINGS = ("", "peak", "measured", *ORDER, "other", "cache", "on the host", "worst at")


def _html(run: RunRecord) -> str:
    """A row for full training and one for each block; a column in which no row has anything is left out."""
    assert run.memory_peaks is not None  # the section's condition
    full = run.memory_peaks.full
    rows = [["full training", *_cells(full, None, _measured(run, 0) if run.is_full else None)]]
    if not run.is_full:
        for index, peak in enumerate(run.memory_peaks.blocks):
            in_memory = [use.bytes for use in run.cache_uses if use.block == index and use.place != "file"]
            rows.append([f"block {index}", *_cells(peak, max(in_memory, default=None), _measured(run, index))])
    kept = [at for at in range(len(HEADINGS)) if any(cells[at] != ABSENT for cells in rows)]
    return table([HEADINGS[at] for at in kept], [[cells[at] for at in kept] for cells in rows])


def _note(run: RunRecord) -> str:
    text = (
        "the bytes of all tensors alive at the worst moment of a step, found before training by running the step on "
        "fake tensors. What frozen blocks left on the host and what a prefix cache stored are listed beside them. "
        "Measured: on a GPU, the most that PyTorch allocated in the block's visits; on a CPU, the resident set of the "
        "process, which includes Python and its libraries and never shrinks. "
    )
    if run.header.layout != "data":
        text += (
            "Tracked for one process that has the whole model: with the layout "
            f"'{run.header.layout}' each of several processes has less. Measured on rank 0. "
        )
    return text + (f"Micro-batches: {run.micro_batch.reason}." if run.micro_batch else "")


def _cells(peak: PeakMemory, cached: int | None, measured: int | None) -> list[str]:
    known = [peak.parts.get(part, 0) for part in ORDER]
    total = sum(peak.parts.values())
    counts = [total, measured, *known, total - sum(known), cached, peak.host_bytes]
    texts = [format_bytes(count) if count else ABSENT for count in counts]
    return [*texts, peak.operation.removeprefix("aten.").removesuffix(".default") or ABSENT]


def _measured(run: RunRecord, block: int) -> int | None:
    found = [row.peak_memory_bytes for row in run.visit_ends if row.block == block and row.peak_memory_bytes]
    return max(found, default=None)


TRACKED_MEMORY = Section(
    title="Memory by part, tracked",
    note=_note,
    html=_html,
    condition=lambda run: run.memory_peaks is not None,
    in_comparison=True,
)

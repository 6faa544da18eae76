"""The memory of a step by arithmetic: bytes by part in full training, and with each block active."""

from __future__ import annotations

from blocktrain.report.memory_parts import memory_bars
from blocktrain.report.run import RunRecord
from blocktrain.report.section import Section


def _html(run: RunRecord) -> str:
    assert run.cost is not None  # the section's condition
    full = "full training"
    memories = [(full, run.cost.memory.full)]
    if not run.is_full:
        memories += [(f"block {index}", memory) for index, memory in enumerate(run.cost.memory.blocks)]
    return memory_bars(memories, strong=full)


STEP_MEMORY = Section(
    title="Memory of a step",
    note=lambda run: "bytes by part" + ("." if run.is_full else ", in full training and with each block active."),
    html=_html,
    condition=lambda run: run.cost is not None,
    form="half",
)

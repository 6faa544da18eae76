"""Counted FLOPs of a step with each block active, as shares of a full step, and the closed formula's values."""

from __future__ import annotations

from blocktrain.report.chart import Bar, stacked_bars
from blocktrain.report.format import flops_text
from blocktrain.report.run import RunRecord
from blocktrain.report.section import Section, block_colour


def _note(run: RunRecord) -> str:
    assert run.cost is not None  # the section's condition
    note = f"counted, as a share of a full step ({flops_text(run.cost.flops.full)}). The tick is the formula's value."
    by = _saved_by(run)
    return note + (f" The pale part is what {by} saved, which the formula does not include." if by else "")


def _html(run: RunRecord) -> str:
    assert run.cost is not None  # the section's condition
    flops, by = run.cost.flops, _saved_by(run)
    formula = [block / flops.theory_full if flops.theory_full else None for block in flops.theory_blocks]
    formula += [None] * (len(flops.blocks) - len(formula))
    spent = [run.mean_step_flops(block) for block in range(len(flops.blocks))]
    bars = [Bar(label="full training", pieces=[(1.0, "plain", flops_text(flops.full))], text="1", strong=True)]
    for index, (mean, counted, expected) in enumerate(zip(spent, flops.blocks, formula, strict=False)):
        work = (mean, counted, flops.full)
        bars.append(_share_bar(f"block {index}", block_colour(run, index), work, expected, by))
    if len(flops.blocks) > 1:
        known = [share for share in formula if share is not None]
        expected = sum(known) / len(known) if known else None
        work = (sum(spent) / len(spent), sum(flops.blocks) / len(spent), flops.full)
        bars.append(_share_bar("mean of blocks", "plain", work, expected, by, strong=True))
    chart = stacked_bars(bars, 1.0, label="FLOPs of a step", row_height=26 if len(bars) <= 16 else 16)
    return f'<div class="bars">{chart}</div>'


def _saved_by(run: RunRecord) -> str:
    """What made steps cheaper than steps of the whole model without a cache."""
    left_out = any(visit.left_out for visit in run.visits)
    return " and ".join(["the prefix cache"] * bool(run.cache_uses) + ["leaving out layers"] * left_out)


def _share_bar(
    label: str, css: str, work: tuple[float, float, int], formula: float | None, by: str, *, strong: bool = False
) -> Bar:
    """`work`: FLOPs of a step as spent, as counted for the whole model without a cache, and of a full step. `by` is
    what saved the difference between the first two."""
    spent, counted, full = work
    title = f"{flops_text(counted)} counted, {counted / full:.3f} of a full step"
    title += "" if formula is None else f"; formula {formula:.3f}"
    pieces = [(spent / full, css, title)]
    if spent < counted:
        saved = f"{flops_text(counted - spent)} saved by {by}, on average over the visits so far"
        pieces.append(((counted - spent) / full, f"{css} open", saved))
    return Bar(label=label, pieces=pieces, text=f"{spent / full:.3f}", mark=formula, mark_title=title, strong=strong)


STEP_FLOPS = Section(
    title="FLOPs of a step",
    note=_note,
    html=_html,
    condition=lambda run: bool(not run.is_full and run.cost and run.cost.flops.full and run.cost.flops.blocks),
    form="half",
)

"""A run in plain sentences: what it reached, what training in blocks saved against full training, and what it cost.

The report prints them below its title, and the command line prints them last. Every figure is one of the run's
summary, but for the two that are not the run's own: how many more steps blocks need is measured by running full
training as well, so a single run can only quote what was measured elsewhere (`tests/report/test_in_words.py` compares
both with their result files).
"""

from __future__ import annotations

from blocktrain.report.format import decimal, percent, plural
from blocktrain.report.run import RunRecord
from blocktrain.report.summary import Summary
from blocktrain.units import format_bytes, format_count, format_seconds

# Full training's tokens to the last loss of plain blocks from scratch went into those of blocks this many times:
# experiments/ablations/large.json (10.8 M parameters, three seeds) and benchmarks/prefix/books.json (19 M, one seed).
MULTIPLIERS_FROM_SCRATCH = (2.1, 2.3)
# The paper's average over its models and data sets (section 4.2.3).
PAPERS_MULTIPLIER = 1.39


def in_words(run: RunRecord, item: Summary) -> tuple[str, ...]:
    """The run in sentences. `item` is its summary; what the log does not say is left out.

    A run of full training has one sentence. A run in blocks has up to three: what was reached, what was saved, and
    what it cost.
    """
    sentences = [_reached(run, item)]
    if not run.is_full:
        sentences += [text for text in (_saved(run, item), _cost(run)) if text]
    return tuple(sentences)


def _reached(run: RunRecord, item: Summary) -> str:
    """Model, length and loss."""
    size = f"{format_count(item.parameters)} parameters"
    unit = item.unit
    if run.is_full:
        parts = [f"{item.model}, {size} trained in full", plural(item.steps, "step")]
    else:
        done = f"{plural(item.visits, 'visit')}, {plural(item.steps, 'step')}"
        parts = [f"{item.model}, all {size} trained in {plural(item.blocks, 'block')}", done]
    parts[-1] += f", {format_count(item.tokens)} {unit} in {format_seconds(item.seconds)}"
    if item.validation_loss_per_byte is not None:
        before = run.evaluations[0].loss_per_byte if run.evaluations[1:] else None
        parts.append(f"validation loss {decimal(item.validation_loss_per_byte)} nats per byte")
    elif item.validation_loss is not None:
        before = run.evaluations[0].loss if run.evaluations[1:] else None
        parts.append(f"validation loss {decimal(item.validation_loss)} nats per {unit.removesuffix('s')}")
    else:
        before = None
    if item.accuracy is not None:
        parts[-1] += f", accuracy {percent(item.accuracy)}"
    if item.exact_match is not None:
        parts[-1] += f", exact match {percent(item.exact_match)}"
    if before is not None:
        parts[-1] += f" (the loss at its start: {decimal(before)})"
    return "; ".join(parts) + "."


def _saved(run: RunRecord, item: Summary) -> str:
    """Memory and FLOPs of a step, compared with those of a full step."""
    parts: list[str] = []
    if item.memory is not None and item.memory_full is not None:
        mine, full = item.memory, item.memory_full
        trained = [sum(part.get(name, 0) for name in ("gradients", "moments", "master")) for part in (mine, full)]
        parts.append(
            f"a step's memory at its largest is {_instead(sum(mine.values()), sum(full.values()))}; gradients, master "
            f"and optimizer state take {_instead(*trained)} of it"
        )
    if item.flops_ratio is not None:
        beside = [f"{decimal(item.flops_ratio_uncached)} without the prefix cache"] if run.cache_uses else []
        beside += [f"formula {decimal(item.flops_ratio_theory)}"] if item.flops_ratio_theory is not None else []
        more = f" ({', '.join(beside)})" if beside else ""
        parts.append(f"on average a step computes {decimal(item.flops_ratio)} of a full step's FLOPs{more}")
    return f"Saved against full training: {'; '.join(parts)}." if parts else ""


def _instead(mine: int, full: int) -> str:
    """Bytes, compared with those of full training.

    >>> _instead(2**20, 2**22)
    '1.0 MiB instead of 4.0 MiB (75 % less)'
    """
    if mine == full or not full:
        return f"{format_bytes(mine)}, as in full training"
    change = percent(abs(1 - mine / full))
    return f"{format_bytes(mine)} instead of {format_bytes(full)} ({change} {'less' if mine < full else 'more'})"


def _cost(run: RunRecord) -> str:
    """How many updates a weight got, and what that is known to cost in steps; only for plain visits, where a visit
    trains its block alone."""
    header, steps = run.header, run.steps_done
    sizes = {block.index: block.parameters for block in header.blocks}
    plain = header.span == "block" and header.tail == "none" and not any(visit.left_out for visit in run.visits)
    if not (plain and steps and run.visits and sum(sizes.values())):
        return ""
    updated = run.spent_until(steps, lambda visit: sizes.get(visit.block, 0)) / sum(sizes.values())
    low, high = MULTIPLIERS_FROM_SCRATCH
    return (
        f"The cost: each weight was updated in {updated:,.0f} of {plural(steps, 'step')} on average, so blocks need "
        f"more steps for the same loss: {low} to {high} times full training's when we trained language models from "
        f"scratch, {PAPERS_MULTIPLIER} times on average in the paper. `blocktrain compare` measures it on your "
        "model and data, and the time."
    )

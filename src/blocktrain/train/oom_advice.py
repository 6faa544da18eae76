"""Out of memory is answered with advice: which part was the largest, and what changes would save how much.

The parts are those that were tracked when the run began (see `predict_memory.py`); each saving is arithmetic on them:

    batch.micro_rows r -> s     activations, logits and inputs shrink to s/r
    blocks.count M -> 2M        master, gradients and moments halve; blocks.largest where layers must come apart
    schedule.span = "block"     the same shrink to 1/M, where a visit also trains all blocks above
    optimizer.in_backward       only the largest gradient stays
    precision                   fp32 -> bf16-exact: weights halve, but the active block gets a master;
                                bf16 -> int8, int8 -> nf4: frozen weights halve again
    optimizer.tail = "none"     the tail keeps no inputs of matrices: 6 of 28 parts of the activations in GPT-2
    memory.checkpointing        of the activations, what one layer of the chain keeps stays
    memory.loss_chunk           a tenth of the logits stays
    memory.frozen = "host"      two layers of the frozen weights stay
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from blocktrain.errors import OutOfMemoryError
from blocktrain.records.run_records import MemoryPeaks
from blocktrain.runtime import free_memory_bytes, is_out_of_memory
from blocktrain.train.config import moves_in_backward
from blocktrain.train.context import TrainingContext
from blocktrain.units import format_bytes

Parts = Mapping[str, int]  # part of memory -> bytes


@contextmanager
def advise_when_out_of_memory(
    context: TrainingContext, memory: MemoryPeaks, doing: str, *, is_external: bool = False
) -> Iterator[None]:
    """Turn an allocation that fails inside into an `OutOfMemoryError` with advice.

    memory: the tracked peaks of a step. doing: what was going on, for the message. is_external: whether another
    package's method trains: it has no blocks of ours, and its run no checkpoints.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # frees the tensors of the step that failed
        active = context.optimizer.block
        peaks = memory.blocks if active is None else memory.blocks[active.index : active.index + 1]
        parts = max((peak.parts for peak in peaks), key=lambda parts: sum(parts.values()))
        plan = advice(context, parts, is_external=is_external)
        kept = (
            "a run by another package's method has no checkpoint and starts over"
            if is_external
            else "the last checkpoint is unharmed"
        )
        raise OutOfMemoryError(f"out of memory {doing}; {plan}; {kept}") from None


def advice(context: TrainingContext, parts: Parts, *, is_external: bool = False) -> str:
    """The largest part and the changes that would save most, as the end of a message."""
    name, largest = max(parts.items(), key=lambda item: item[1])
    others = ", ".join(f"{part} {format_bytes(count)}" for part, count in parts.items() if part != name)
    free = format_bytes(free_memory_bytes(context.device))
    said = f"the largest part of a step is {name}, {format_bytes(largest)} (the rest: {others}); {free} are free. "
    found = sorted(savings(context, parts, is_external=is_external).items(), key=lambda item: -item[1])
    steps = "; ".join(f"{change} saves about {format_bytes(saved)}" for change, saved in found)
    return said + (f"Start again with: {steps}" if steps else "Use a machine with more memory, or a smaller model")


def savings(context: TrainingContext, parts: Parts, *, is_external: bool = False) -> dict[str, int]:
    """What to change -> bytes saved, nearest changes only; those that save nothing are left out."""
    config, layers = context.config, len(context.partition.chain.layers)
    found: dict[str, int] = {}

    rows = context.micro_rows
    smaller = max((count for count in range(1, rows) if config.batch.rows % count == 0), default=rows)
    key = "rows" if moves_in_backward(config) else "micro_rows"
    by_rows = sum(parts.get(part, 0) for part in ("activations", "logits", "inputs"))
    found[f"batch.{key} {rows} -> {smaller}"] = by_rows * (rows - smaller) // rows
    if not is_external:
        found |= _savings_of_blocks(context, parts)
    if config.memory.checkpointing == "off":
        found["memory.checkpointing = 'layers'"] = parts.get("activations", 0) * (layers - 1) // layers
    if config.memory.loss_chunk is None and config.data_kind.has_vocabulary:
        tokens = rows * context.geometry.tokens_per_step // config.batch.rows
        found[f"memory.loss_chunk = {max(1, tokens // 10)}"] = parts.get("logits", 0) * 9 // 10
    can_offload = config.memory.frozen == "device" and config.optimizer.tail == "none" and not is_external
    if can_offload and context.device.type != "cpu":
        found["memory.frozen = 'host'"] = parts.get("frozen", 0) * max(0, layers - 2) // layers
    return {change: saved for change, saved in found.items() if saved > 0}


def _savings_of_blocks(context: TrainingContext, parts: Parts) -> dict[str, int]:
    """What only block coordinate descent can change."""
    config, blocks, layers = context.config, len(context.partition), len(context.partition.chain.layers)
    found: dict[str, int] = {}

    by_block = sum(parts.get(part, 0) for part in ("master", "gradients", "moments"))
    if config.blocks.patterns is None and config.blocks.largest is None and blocks < layers:
        more = min(2 * blocks, layers)
        found[f"blocks.count {blocks} -> {more}"] = by_block * (more - blocks) // more
    else:
        scalars = max(block.num_parameters for block in context.partition)
        found[f"blocks.largest = {scalars // 2}"] = by_block // 2
    if config.schedule.span == "suffix":
        found["schedule.span = 'block'"] = by_block * (blocks - 1) // blocks

    is_one_pass = context.ranks.size == 1 and context.micro_rows == config.batch.rows
    needs_gradients = config.on_nonfinite == "skip" or config.optimizer.max_grad_norm is not None
    if is_one_pass and not needs_gradients and not config.optimizer.in_backward:
        largest = max(p.nbytes for block in context.trained for p in block.parameters.values())
        found["optimizer.in_backward = true"] = parts.get("gradients", 0) - largest

    frozen = parts.get("frozen", 0)
    if config.optimizer.tail != "none":  # needs fp32
        found["optimizer.tail = 'none'"] = parts.get("activations", 0) * 6 // 28
    elif config.precision == "fp32":
        found["precision = 'bf16-exact'"] = (frozen - parts.get("active", 0)) // 2
    elif config.precision != "nf4":
        found["precision = 'nf4'" if config.precision == "int8" else "precision = 'int8'"] = frozen // 2
    return found

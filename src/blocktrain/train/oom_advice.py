"""Out of memory is met with a plan: which part was the largest, and what changes would save how much.

The parts are those that were tracked at the start (see `accounting.py`), the savings arithmetic on them:

    batch.micro_rows r -> s     activations, logits and inputs shrink to s/r
    blocks.count M -> 2M        master, gradients and moments to half; blocks.largest where layers must come apart
    schedule.span = "block"     the same to 1/M, where a visit trains all blocks above too
    optimizer.in_backward       of the gradients, the largest one stays
    precision                   fp32 -> bf16-exact: weights to half, but for the active block, which gets a master;
                                bf16 -> int8, int8 -> nf4: frozen weights to half again
    optimizer.tail = "none"     of the activations, the tail keeps no inputs of matrices: 6 of 28 parts in GPT-2
    memory.checkpointing        of the activations, what one layer in the chain keeps stays
    memory.loss_chunk           of the logits, a tenth stays
    memory.frozen = "host"      of the frozen weights, two layers stay
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from blocktrain.errors import OutOfMemoryError
from blocktrain.records.log import Event
from blocktrain.runtime import free_memory_bytes, is_out_of_memory
from blocktrain.train.context import TrainingContext
from blocktrain.units import format_bytes

Parts = Mapping[str, int]

BY_ROWS = ("activations", "logits", "inputs")
BY_BLOCK = ("master", "gradients", "moments")


@contextmanager
def advise_when_out_of_memory(context: TrainingContext, memory: Event, doing: str) -> Iterator[None]:
    """Turn an allocation that failed inside into an `OutOfMemoryError` with a plan.

    memory: the record `memory`. doing: what was going on, to say so.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # frees the tensors of the step that failed
        active = context.optimizer.block
        blocks = memory["blocks"] if active is None else [memory["blocks"][active.index]]
        parts = max((block["parts"] for block in blocks), key=lambda parts: sum(parts.values()))
        said = f"out of memory {doing}; {advice(context, parts)}; the last checkpoint is as it was"
        raise OutOfMemoryError(said) from None


def advice(context: TrainingContext, parts: Parts) -> str:
    """The largest part and the changes that would save most, as the end of a message."""
    name, largest = max(parts.items(), key=lambda item: item[1])
    others = ", ".join(f"{part} {format_bytes(count)}" for part, count in parts.items() if part != name)
    free = format_bytes(free_memory_bytes(context.device))
    said = f"the largest part of a step is {name}, {format_bytes(largest)} (beside {others}); {free} are free. "
    found = sorted(savings(context, parts).items(), key=lambda item: -item[1])
    steps = "; ".join(f"{change} saves about {format_bytes(saved)}" for change, saved in found)
    return said + (f"Train anew with: {steps}" if steps else "Take a machine with more memory, or a smaller model")


def savings(context: TrainingContext, parts: Parts) -> dict[str, int]:
    """What to change -> bytes saved, nearest changes only; those that save nothing are left out."""
    config, rows = context.config, context.micro_rows
    smaller = max((count for count in range(1, rows) if config.batch.rows % count == 0), default=rows)
    by_rows, by_block = (sum(parts.get(part, 0) for part in names) for names in (BY_ROWS, BY_BLOCK))
    in_place = config.optimizer.tail != "none"  # weights that move where they are: fp32, on the device, whole batches
    in_backward = config.optimizer.in_backward
    divided = "rows" if in_place or in_backward else "micro_rows"
    found = {f"batch.{divided} {rows} -> {smaller}": by_rows * (rows - smaller) // rows}
    blocks, layers = len(context.partition), len(context.partition.chain.layers)
    if config.blocks.patterns is None and config.blocks.largest is None and blocks < layers:
        more = min(2 * blocks, layers)
        found[f"blocks.count {blocks} -> {more}"] = by_block * (more - blocks) // more
    else:
        scalars = max(block.num_parameters for block in context.partition)
        found[f"blocks.largest = {scalars // 2}"] = by_block // 2
    if config.schedule.span == "suffix":
        found["schedule.span = 'block'"] = by_block * (blocks - 1) // blocks
    one_pass = context.ranks.size == 1 and rows == config.batch.rows and config.on_nonfinite == "stop"
    if one_pass and config.optimizer.max_grad_norm is None and not in_backward:
        largest = max(p.nbytes for block in context.trained for p in block.parameters.values())
        found["optimizer.in_backward = true"] = parts.get("gradients", 0) - largest
    frozen, memory = parts.get("frozen", 0), config.memory
    if in_place:
        found["optimizer.tail = 'none'"] = parts.get("activations", 0) * 6 // 28
    elif config.precision == "fp32":
        found["precision = 'bf16-exact'"] = (frozen - parts.get("active", 0)) // 2
    elif config.precision != "nf4":
        found["precision = 'nf4'" if config.precision == "int8" else "precision = 'int8'"] = frozen // 2
    if memory.checkpointing == "off":
        found["memory.checkpointing = 'layers'"] = parts.get("activations", 0) * (layers - 1) // layers
    if memory.loss_chunk is None and (config.text or config.chat) is not None:
        found[f"memory.loss_chunk = {max(1, rows * context.geometry.tokens_per_step // config.batch.rows // 10)}"] = (
            parts.get("logits", 0) * 9 // 10
        )
    if memory.frozen == "device" and context.device.type != "cpu" and not in_place:
        found["memory.frozen = 'host'"] = frozen * max(0, layers - 2) // layers
    return {change: saved for change, saved in found.items() if saved > 0}

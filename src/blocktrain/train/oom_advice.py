"""Out of memory is answered with advice: which part was the largest, and what changes would save how much.

The parts are those that were tracked when the run began (see `predict_memory.py`); each saving is arithmetic on them,
and one function below:

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from blocktrain.errors import OutOfMemoryError
from blocktrain.records.run_records import MemoryPeaks
from blocktrain.runtime import free_memory_bytes, is_out_of_memory
from blocktrain.train.config import moves_in_backward
from blocktrain.train.context import TrainingContext
from blocktrain.units import format_bytes

Parts = Mapping[str, int]

BY_ROWS = ("activations", "logits", "inputs")
BY_BLOCK = ("master", "gradients", "moments")


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
        kept = (
            "a run by another package's method has no checkpoint and starts over"
            if is_external
            else "the last checkpoint is unharmed"
        )
        plan = advice(context, parts, EXTERNAL_SAVINGS if is_external else SAVINGS)
        said = f"out of memory {doing}; {plan}; {kept}"
        raise OutOfMemoryError(said) from None


def advice(context: TrainingContext, parts: Parts, ways: Sequence[Way] | None = None) -> str:
    """The largest part and the changes that would save most, as the end of a message."""
    name, largest = max(parts.items(), key=lambda item: item[1])
    others = ", ".join(f"{part} {format_bytes(count)}" for part, count in parts.items() if part != name)
    free = format_bytes(free_memory_bytes(context.device))
    said = f"the largest part of a step is {name}, {format_bytes(largest)} (the rest: {others}); {free} are free. "
    found = sorted(savings(context, parts, ways).items(), key=lambda item: -item[1])
    steps = "; ".join(f"{change} saves about {format_bytes(saved)}" for change, saved in found)
    return said + (f"Start again with: {steps}" if steps else "Use a machine with more memory, or a smaller model")


def savings(context: TrainingContext, parts: Parts, ways: Sequence[Way] | None = None) -> dict[str, int]:
    """What to change -> bytes saved, nearest changes only; those that save nothing are left out. ways: all `SAVINGS`
    unless given."""
    found = [way(context, parts) for way in ways or SAVINGS]
    return {change: saved for change, saved in (pair for pair in found if pair is not None) if saved > 0}


Saving = tuple[str, int] | None  # what to change, and the bytes it saves; None where the change cannot be made
Way = Callable[[TrainingContext, Parts], Saving]


def _smaller_batch(context: TrainingContext, parts: Parts) -> Saving:
    config, rows = context.config, context.micro_rows
    smaller = max((count for count in range(1, rows) if config.batch.rows % count == 0), default=rows)
    key = "rows" if moves_in_backward(context.config) else "micro_rows"
    return f"batch.{key} {rows} -> {smaller}", _sum(parts, BY_ROWS) * (rows - smaller) // rows


def _smaller_blocks(context: TrainingContext, parts: Parts) -> Saving:
    blocks, layers = len(context.partition), len(context.partition.chain.layers)
    if context.config.blocks.patterns is None and context.config.blocks.largest is None and blocks < layers:
        more = min(2 * blocks, layers)
        return f"blocks.count {blocks} -> {more}", _sum(parts, BY_BLOCK) * (more - blocks) // more
    scalars = max(block.num_parameters for block in context.partition)
    return f"blocks.largest = {scalars // 2}", _sum(parts, BY_BLOCK) // 2


def _one_block_a_visit(context: TrainingContext, parts: Parts) -> Saving:
    blocks = len(context.partition)
    is_suffix = context.config.schedule.span == "suffix"
    return ("schedule.span = 'block'", _sum(parts, BY_BLOCK) * (blocks - 1) // blocks) if is_suffix else None


def _step_in_backward(context: TrainingContext, parts: Parts) -> Saving:
    config = context.config
    one_pass = context.ranks.size == 1 and context.micro_rows == config.batch.rows and config.on_nonfinite == "stop"
    if not one_pass or config.optimizer.max_grad_norm is not None or config.optimizer.in_backward:
        return None
    largest = max(p.nbytes for block in context.trained for p in block.parameters.values())
    return "optimizer.in_backward = true", parts.get("gradients", 0) - largest


def _frozen_tail(context: TrainingContext, parts: Parts) -> Saving:
    has_tail = context.config.optimizer.tail != "none"
    return ("optimizer.tail = 'none'", parts.get("activations", 0) * 6 // 28) if has_tail else None


def _lower_precision(context: TrainingContext, parts: Parts) -> Saving:
    precision, frozen = context.config.precision, parts.get("frozen", 0)
    if precision == "nf4" or context.config.optimizer.tail != "none":  # a tail needs fp32
        return None
    if precision == "fp32":
        return "precision = 'bf16-exact'", (frozen - parts.get("active", 0)) // 2
    return ("precision = 'nf4'" if precision == "int8" else "precision = 'int8'"), frozen // 2


def _checkpointing(context: TrainingContext, parts: Parts) -> Saving:
    layers = len(context.partition.chain.layers)
    is_off = context.config.memory.checkpointing == "off"
    return ("memory.checkpointing = 'layers'", parts.get("activations", 0) * (layers - 1) // layers) if is_off else None


def _chunked_loss(context: TrainingContext, parts: Parts) -> Saving:
    config = context.config
    if config.memory.loss_chunk is not None or not config.data_kind.has_vocabulary:
        return None
    tokens = context.micro_rows * context.geometry.tokens_per_step // config.batch.rows
    return f"memory.loss_chunk = {max(1, tokens // 10)}", parts.get("logits", 0) * 9 // 10


def _frozen_on_host(context: TrainingContext, parts: Parts) -> Saving:
    config, layers = context.config, len(context.partition.chain.layers)
    if config.memory.frozen == "host" or context.device.type == "cpu" or config.optimizer.tail != "none":
        return None
    return "memory.frozen = 'host'", parts.get("frozen", 0) * max(0, layers - 2) // layers


EXTERNAL_SAVINGS: tuple[Way, ...] = (_smaller_batch, _checkpointing, _chunked_loss)  # for any method
SAVINGS: tuple[Way, ...] = (
    _smaller_batch,
    _smaller_blocks,
    _one_block_a_visit,
    _step_in_backward,
    _frozen_tail,
    _lower_precision,
    _checkpointing,
    _chunked_loss,
    _frozen_on_host,
)


def _sum(parts: Parts, names: tuple[str, ...]) -> int:
    return sum(parts.get(part, 0) for part in names)

"""Chooses the largest micro-batch that fits (`batch.micro_rows = "auto"`): predicted first, then tried for real.

For each divisor of `batch.rows`, the largest first, the peak of each block's step is predicted on a fake-tensor copy
of the model. If all peaks fit into the free memory, the forward and backward pass of the worst block is run for real,
with everything allocated that its visit will hold. A size that runs out of memory after all is divided further. It is
decided once, before the first step, and logged. A resumed run keeps it, because sums over other micro-batches differ
in their last bits.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from blocktrain.chain.block import Block
from blocktrain.chain.freezing import evaluating
from blocktrain.errors import OutOfMemoryError
from blocktrain.memory.tracker import Peak
from blocktrain.records.run_records import MicroBatch
from blocktrain.runtime import free_memory_bytes, is_out_of_memory, to_device
from blocktrain.train.context import TrainingContext
from blocktrain.train.oom_advice import advice
from blocktrain.train.predict_memory import StepShape, predicted_peaks
from blocktrain.train.techniques.memory_saving import saving_memory
from blocktrain.units import format_bytes

SHARE = 0.9  # of what is free may be planned: allocators round up, kernels need room of their own


def divisors(rows: int) -> list[int]:
    """All divisors of `rows`, the largest first."""
    return [divisor for divisor in range(rows, 0, -1) if rows % divisor == 0]


def step_shape(context: TrainingContext, micro_rows: int) -> StepShape:
    """A training step of `context` over its first rows, `micro_rows` at a time."""
    batch = to_device(context.data.train.batch(range(micro_rows)), context.device)
    return StepShape(
        loss=lambda model: model(**batch).loss,
        micro_steps=math.ceil(context.rank_rows / micro_rows),
        max_grad_norm=context.config.optimizer.max_grad_norm or float("inf"),
        inputs=tuple(batch.values()),
        saving=lambda partition: saving_memory(partition, context.config.memory),
    )


def beside_weights(peak: Peak) -> int:
    """Bytes of a peak beyond the model's own weights and buffers."""
    return peak.bytes - sum(peak.parts.get(part, 0) for part in ("frozen", "active", "buffers"))


def auto_micro_rows(context: TrainingContext) -> MicroBatch:
    """How many rows to take at a time, and why; raises `OutOfMemoryError` where not even a single row fits."""
    free = free_memory_bytes(context.device)
    kept = 0  # moments of frozen blocks, where they lie in the memory that training uses
    if context.device.type == "cpu" and context.config.optimizer.state == "host":
        kept = sum(context.optimizer.predicted_state_bytes(block) for block in context.partition)
    failed: list[int] = []
    for rows in divisors(context.rank_rows):
        peaks = predicted_peaks(context.optimizer, step_shape(context, rows), blocks=context.trained)
        needed = [beside_weights(peak) + kept for peak in peaks]
        worst = max(range(len(needed)), key=lambda index: needed[index])
        if needed[worst] > SHARE * free:
            continue
        if not _runs(context, context.trained[worst], peaks[worst], rows):
            failed.append(rows)
            continue
        reason = f"{rows} of {context.rank_rows} rows need {format_bytes(needed[worst])} of {format_bytes(free)} free"
        return MicroBatch(micro_rows=rows, reason=reason, failed=tuple(failed))
    peaks = predicted_peaks(context.optimizer, step_shape(context, 1), blocks=context.trained)
    raise OutOfMemoryError(
        f"not a single row fits: {format_bytes(max(map(beside_weights, peaks)) + kept)} needed "
        f"in addition to the weights, {format_bytes(free)} free; "
        f"{advice(replace(context, micro_rows=1), max(peaks, key=beside_weights).parts)}"
    )


def _runs(context: TrainingContext, block: Block, peak: Peak, rows: int) -> bool:
    """Whether a forward and backward pass fits beside what a visit to `block` holds. Leaves no trace."""
    step = step_shape(context, rows)
    buffers = {buffer: buffer.clone() for buffer in context.model.buffers()}
    accelerators = [] if context.device.type == "cpu" else [context.device.index or 0]
    with evaluating(context.model), torch.random.fork_rng(accelerators):  # `evaluating` puts the modes back
        try:
            with step.saving(context.partition), context.optimizer.visit(block):
                moments = torch.ones(peak.parts.get("moments", 0), dtype=torch.uint8, device=context.device)
                step.loss(context.model).backward()
                del moments
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            context.optimizer.store.clear()  # what the visit left: no moments
            with torch.no_grad():
                for buffer, before in buffers.items():
                    buffer.copy_(before)
    return True

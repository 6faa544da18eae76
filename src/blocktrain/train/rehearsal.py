"""`batch.micro_rows = "auto"`: the largest part of a batch that fits, predicted first and then rehearsed.

For each divisor of `batch.rows`, the largest first: the peak of each block's step is predicted on a copy without
memory; if all fit into what is free, the forward and backward pass of the worst block is run for real, with what its
visit will hold beside it. One that runs out of memory after all is divided further. It is decided once, before the
first step, and logged: a resumed run keeps it, for the sums of micro-batches differ in their last bits.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from blocktrain.blocks.activation import evaluating
from blocktrain.blocks.block import Block
from blocktrain.errors import OutOfMemoryError
from blocktrain.events import Event
from blocktrain.model.tracker import Peak
from blocktrain.runtime import free_memory_bytes, is_out_of_memory
from blocktrain.train.accounting import StepShape, predicted_peaks
from blocktrain.train.job import Job
from blocktrain.train.memory import saving_memory
from blocktrain.train.outofmemory import plan
from blocktrain.train.task import to_device
from blocktrain.units import format_bytes

SHARE = 0.9  # of what is free may be planned: allocators round up, kernels need room of their own


def divisors(rows: int) -> list[int]:
    """All divisors of `rows`, the largest first."""
    return [divisor for divisor in range(rows, 0, -1) if rows % divisor == 0]


def step_shape(job: Job, micro_rows: int) -> StepShape:
    """A training step of `job` over its first rows, `micro_rows` at a time."""
    batch = to_device(job.task.train.batch(range(micro_rows)), job.device)
    return StepShape(
        loss=lambda model: job.task.loss(model, batch),
        micro_steps=math.ceil(job.rank_rows / micro_rows),
        max_grad_norm=job.config.optimizer.max_grad_norm or float("inf"),
        inputs=tuple(batch.values()),
        saving=lambda partition: saving_memory(partition, job.config.memory),
    )


def beside_weights(peak: Peak) -> int:
    """Bytes of a peak that are not there yet when the model is."""
    return peak.bytes - sum(peak.parts.get(part, 0) for part in ("frozen", "active", "buffers"))


def decide_micro_rows(job: Job) -> Event:
    """The record `micro_batch`; raises `OutOfMemoryError` where not even a single row fits."""
    free = free_memory_bytes(job.device)
    kept = _kept_on_this_device(job)
    failed: list[int] = []
    for rows in divisors(job.rank_rows):
        peaks = predicted_peaks(job.optimizer, step_shape(job, rows), blocks=job.trained)
        needed = [beside_weights(peak) + kept for peak in peaks]
        worst = max(range(len(needed)), key=lambda index: needed[index])
        if needed[worst] > SHARE * free:
            continue
        if not _runs(job, job.trained[worst], peaks[worst], rows):
            failed.append(rows)
            continue
        reason = f"{rows} of {job.rank_rows} rows need {format_bytes(needed[worst])} of {format_bytes(free)} free"
        return {"kind": "micro_batch", "micro_rows": rows, "reason": reason, "failed": failed}
    peaks = predicted_peaks(job.optimizer, step_shape(job, 1), blocks=job.trained)
    raise OutOfMemoryError(
        f"not a single row fits: {format_bytes(max(map(beside_weights, peaks)) + kept)} needed beside the weights, "
        f"{format_bytes(free)} free; {plan(replace(job, micro_rows=1), max(peaks, key=beside_weights).parts)}"
    )


def _kept_on_this_device(job: Job) -> int:
    """Moments of frozen blocks, where they lie in the memory that training uses."""
    if job.device.type != "cpu" or job.config.optimizer.state != "host":
        return 0
    return sum(job.optimizer.predicted_state_bytes(block) for block in job.partition)


def _runs(job: Job, block: Block, peak: Peak, rows: int) -> bool:
    """Whether a forward and backward pass fits beside what a visit to `block` holds. Leaves no trace."""
    step = step_shape(job, rows)
    buffers = {buffer: buffer.clone() for buffer in job.model.buffers()}
    accelerators = [] if job.device.type == "cpu" else [job.device.index or 0]
    with evaluating(job.model), torch.random.fork_rng(accelerators):  # `evaluating` puts the modes back
        try:
            with step.saving(job.partition), job.optimizer.visit(block):
                moments = torch.ones(peak.parts.get("moments", 0), dtype=torch.uint8, device=job.device)
                step.loss(job.model).backward()
                del moments
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            job.optimizer.store.clear()  # what the visit left: no moments
            with torch.no_grad():
                for buffer, before in buffers.items():
                    buffer.copy_(before)
    return True

"""What a run's first records say: what is trained, and what a step of it costs beside a step of full training.

FLOPs and bytes are counted, not estimated: on a copy of the model without memory, with each block active in turn,
and with everything active for comparison. The closed form stands beside the count.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blocktrain.blocks.activation import activate, release
from blocktrain.blocks.block import Block
from blocktrain.blocks.checkpointing import checkpointed_layers
from blocktrain.events import Event, read_events
from blocktrain.model.cost import LayerCost, layer_costs, theoretical_step_flops
from blocktrain.model.flops import StepCounter
from blocktrain.model.tracker import Peak
from blocktrain.train.accounting import predicted_peaks
from blocktrain.train.job import Job
from blocktrain.train.memory import saving_memory
from blocktrain.train.rehearsal import decide_micro_rows, step_shape

OPENING = ("run", "cost", "memory", "micro_batch")


def opening_events(job: Job, method: str) -> list[Event]:
    """The records `run`, `cost`, `memory` and, where it is to be decided, `micro_batch` (`report/run.py` has their
    fields)."""
    decided = [decide_micro_rows(job)] if job.config.batch.micro_rows == "auto" else []
    for event in decided:
        job = replace(job, micro_rows=event["micro_rows"])
    return [_run_event(job, method), {"kind": "cost", **_costs(job)}, {"kind": "memory", **_memory(job)}, *decided]


def logged_opening(path: Path) -> list[Event]:
    """The same, of a run that has been begun."""
    return [event for event in read_events(path) if event["kind"] in OPENING]


def _memory(job: Job) -> dict[str, Any]:
    """Tracked peaks of one optimizer step, by part: in a visit to each block, and with all of them active."""
    step = step_shape(job, job.micro_rows)
    blocks = predicted_peaks(job.optimizer, step, blocks=job.trained)
    (full,) = predicted_peaks(job.optimizer, step, partition=job.partition.undivided)
    return {"blocks": [_peak(peak) for peak in blocks], "full": _peak(full)}


def _peak(peak: Peak) -> dict[str, Any]:
    return {"parts": dict(peak.parts), "host_bytes": peak.host_bytes, "operation": peak.operation}


def _run_event(job: Job, method: str) -> Event:
    return {
        "kind": "run",
        "method": method,
        "name": job.config.name,
        "model": type(job.model).__name__,
        "parameters": job.partition.num_parameters,
        "unit": job.task.unit,
        "tokens_per_step": job.pace.tokens_per_step,
        "rows_per_step": job.pace.rows_per_step,
        "steps_planned": job.total_steps,
        "optimizer": job.config.optimizer.name,
        "precision": job.config.precision,
        "state": job.config.optimizer.state,
        "span": job.config.schedule.span,
        "tail": job.config.optimizer.tail,
        "blocks": [
            {
                "index": block.index,
                "first": block.names[0],
                "last": block.names[-1],
                "layers": len(block.names),
                "parameters": block.num_parameters,
            }
            for block in job.partition
        ],
    }


def _costs(job: Job) -> dict[str, Any]:
    """FLOPs of an optimizer step over all its rows, bytes in one process: all blocks active, and in a visit to each."""
    batch = job.task.train.batch(range(job.micro_rows))
    batch = {name: tensor.to(job.device) for name, tensor in batch.items()}
    layers = layer_costs(job.partition.chain, batch)
    whole, *blocks = [_cost(job, block, batch, layers) for block in (job.partition.whole, *job.trained)]
    return {
        "flops": {
            "full": whole["flops"],
            "blocks": [block["flops"] for block in blocks],
            "theory_full": whole["theory"],
            "theory_blocks": [block["theory"] for block in blocks],
            "forward_layers": [_of_all_rows(job, layer.forward_flops) for layer in layers],
        },
        "memory": {"full": whole["memory"], "blocks": [block["memory"] for block in blocks]},
    }


def _of_all_rows(job: Job, flops: int) -> int:
    """From those of a micro-batch."""
    return flops * job.config.batch.rows // job.micro_rows


def _cost(job: Job, block: Block, batch: dict[str, torch.Tensor], layers: tuple[LayerCost, ...]) -> dict[str, Any]:
    chain, memory = job.partition.chain, job.config.memory
    activate(job.partition, block, frozen_dropout=job.config.blocks.frozen_dropout)
    checkpointed = checkpointed_layers(chain) if memory.checkpointing == "layers" else []
    if checkpointed:  # what is computed again depends on the layers' modes
        layers = layer_costs(chain, batch)
    with saving_memory(job.partition, memory):
        counter = StepCounter(job.model, batch)
    release(job.partition)
    tail = job.optimizer.tail_of(block)
    moved = {*block.parameters, *tail}
    step = counter.measure(moved)
    scalars = block.num_parameters
    master = 4 * scalars if job.optimizer.precision.has_master else 0
    summed = master and job.micro_rows < job.rank_rows
    gradients = master if summed else sum(p.nbytes for p in block.parameters.values())
    gradients += max((p.nbytes for p in tail.values()), default=0)  # one at a time
    theory = theoretical_step_flops(layers, _moved_shares(job, moved), checkpointed=checkpointed)
    return {
        "flops": _of_all_rows(job, step.flops),
        "theory": _of_all_rows(job, theory),
        "memory": {
            "weights": job.optimizer.weight_bytes(block) + sum(b.nbytes for b in job.model.buffers()),
            "master": master,
            "gradients": gradients,
            "optimizer": job.optimizer.predicted_state_bytes(block),
            "activations": step.saved_bytes,
        },
    }


def _moved_shares(job: Job, moved: Collection[str]) -> dict[int, float]:
    """Of each layer of which something is moved, the share of its weights that get gradients: a matrix whole, even
    where the block owns rows of it only."""
    shares = {}
    for index, owned in enumerate(job.partition.chain.owned):
        mine = sum(parameter.numel() for name, parameter in owned.items() if name in moved)
        if mine:
            shares[index] = mine / sum(parameter.numel() for parameter in owned.values())
    return shares

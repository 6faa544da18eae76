"""What a run's first records say: what is trained, and what a step of it costs beside a step of full training.

FLOPs and bytes are counted, not estimated: on a copy of the model without memory, with each block active in turn,
and with everything active for comparison. The closed form stands beside the count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blocktrain.blocks.activation import activate, evaluating, release
from blocktrain.blocks.block import Block
from blocktrain.blocks.checkpointing import checkpointed_layers
from blocktrain.events import Event
from blocktrain.model.cost import LayerCost, layer_costs, theoretical_step_flops
from blocktrain.model.flops import StepCost, StepCounter
from blocktrain.model.tracker import Peak
from blocktrain.train.accounting import predicted_peaks
from blocktrain.train.alike import ends, filled, on_the_line
from blocktrain.train.job import Job
from blocktrain.train.memory import saving_memory
from blocktrain.train.rehearsal import step_shape


def opening_events(job: Job, method: str) -> list[Event]:
    """The records `run`, `cost` and `memory` (see `report/run.py` for their fields)."""
    return [_run_event(job, method), {"kind": "cost", **_costs(job)}, {"kind": "memory", **_memory(job)}]


def _memory(job: Job) -> dict[str, Any]:
    """Tracked peaks of one optimizer step, by part: each block active, and all of them."""
    step = step_shape(job, job.micro_rows)
    blocks = predicted_peaks(job.optimizer, step)
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
    """FLOPs and bytes of one optimizer step: all blocks active, and each alone."""
    rows = job.micro_rows
    micro_steps = job.config.batch.rows // rows
    batch = job.task.train.batch(range(rows))
    batch = {name: tensor.to(job.device) for name, tensor in batch.items()}
    blocks = (job.partition.whole, *job.partition)
    steps = (counted_step(job, job.partition.whole, batch), *counted_steps(job, batch))
    layers = layer_costs(job.partition.chain, batch)
    full, *theory = [cost * micro_steps for cost in _theory(job, blocks, batch, layers)]
    memory = [_memory_by_arithmetic(job, block, step, micro_steps) for block, step in zip(blocks, steps, strict=True)]
    return {
        "flops": {
            "full": steps[0].flops * micro_steps,
            "blocks": [step.flops * micro_steps for step in steps[1:]],
            "theory_full": full,
            "theory_blocks": theory,
            "forward_layers": [layer.forward_flops * micro_steps for layer in layers],
        },
        "memory": {"full": memory[0], "blocks": memory[1:]},
    }


def counted_steps(job: Job, batch: Mapping[str, torch.Tensor]) -> list[StepCost]:
    """A forward and backward pass over `batch` with each block active. Of blocks that are alike the lowest and the
    highest are counted: those between have their backward pass end at another layer, and nothing else is different."""

    def between(low: StepCost, high: StepCost, share: float) -> StepCost:
        return StepCost(
            flops=on_the_line(low.flops, high.flops, share),
            saved_bytes=on_the_line(low.saved_bytes, high.saved_bytes, share),
        )

    known = {block.index: counted_step(job, block, batch) for block in ends(job.partition)}
    return filled(job.partition, known, between)


def counted_step(job: Job, block: Block, batch: Mapping[str, torch.Tensor]) -> StepCost:
    """The same with `block` active, counted on a copy without memory."""
    activate(job.partition, block, frozen_dropout=job.config.blocks.frozen_dropout)
    with saving_memory(job.partition, job.config.memory):
        counter = StepCounter(job.model, batch)
    release(job.partition)
    return counter.measure(block.parameters)


def _theory(
    job: Job, blocks: Sequence[Block], batch: Mapping[str, torch.Tensor], layers: tuple[LayerCost, ...]
) -> list[int]:
    """FLOPs by closed form, each block active. What a layer computes again depends on the mode it is in."""
    chain = job.partition.chain
    if job.config.memory.checkpointing == "off":
        return [theoretical_step_flops(layers, _active_shares(job, block)) for block in blocks]
    activate(job.partition, job.partition.whole)
    trained = layer_costs(chain, batch)
    release(job.partition)
    with evaluating(job.model):
        frozen = trained if job.config.blocks.frozen_dropout else layer_costs(chain, batch)
    again = checkpointed_layers(chain)
    return [
        theoretical_step_flops(
            [
                active if layer in block.layers else other
                for layer, active, other in zip(chain.layers, trained, frozen, strict=True)
            ],
            _active_shares(job, block),
            checkpointed=again,
        )
        for block in blocks
    ]


def _memory_by_arithmetic(job: Job, block: Block, step: StepCost, micro_steps: int) -> dict[str, int]:
    scalars = block.num_parameters
    master = 4 * scalars if job.optimizer.precision.has_master else 0
    gradients = sum(p.nbytes for p in block.parameters.values()) if micro_steps == 1 or not master else master
    return {
        "weights": job.optimizer.weight_bytes(block) + sum(b.nbytes for b in job.model.buffers()),
        "master": master,
        "gradients": gradients,
        "optimizer": job.optimizer.predicted_state_bytes(block),
        "activations": step.saved_bytes,
    }


def _active_shares(job: Job, block: Block) -> dict[int, float]:
    """Of each layer that a block owns something of, the share of its weights that get gradients: a matrix whole, even
    where the block owns rows of it only."""
    shares = {}
    for index, owned in enumerate(job.partition.chain.owned):
        mine = sum(parameter.numel() for name, parameter in owned.items() if name in block.parameters)
        if mine:
            shares[index] = mine / sum(parameter.numel() for parameter in owned.values())
    return shares

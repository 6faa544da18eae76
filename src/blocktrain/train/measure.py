"""What a run's first records say: what is trained, and what a step of it costs beside a step of full training.

FLOPs and bytes are counted, not estimated: on a copy of the model without memory, with each block active in turn,
and with everything active for comparison. The closed form stands beside the count.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blocktrain.blocks.activation import activate, evaluating, release
from blocktrain.blocks.block import Block
from blocktrain.blocks.checkpointing import checkpointed_layers
from blocktrain.events import Event, read_events
from blocktrain.model.chain import Layer
from blocktrain.model.cost import LayerCost, layer_costs, theoretical_step_flops
from blocktrain.model.flops import StepCost, StepCounter
from blocktrain.model.tracker import Peak
from blocktrain.runtime import pick_device
from blocktrain.train.accounting import predicted_peaks
from blocktrain.train.alike import ends, filled, on_the_line
from blocktrain.train.growing import growing_visits, running_without
from blocktrain.train.job import Job
from blocktrain.train.memory import saving_memory
from blocktrain.train.rehearsal import decide_micro_rows, step_shape
from blocktrain.train.schema import to_mapping
from blocktrain.train.task import to_device

OPENING = ("run", "cost", "memory", "micro_batch")


def opening_events(job: Job, method: str) -> list[Event]:
    """The records `run`, `cost`, `memory` and, where it is to be decided, `micro_batch` (`report/records.py` has
    their fields)."""
    decided = [decide_micro_rows(job)] if job.config.batch.micro_rows == "auto" else []
    for event in decided:
        job = replace(job, micro_rows=event["micro_rows"])
    return [
        _run_event(job, method),
        {"kind": "cost", **_costs(job), **_growing(job)},
        {"kind": "memory", **_memory(job)},
        *decided,
    ]


def logged_opening(path: Path, length: int, job: Job, method: str) -> list[Event]:
    """The same, of a run that has been begun, from the first `length` bytes of its log; empty where there are none, or
    it was begun on other hardware or in another precision."""
    logged = [event for event in read_events(path, length=length) if event["kind"] in OPENING] if length else []
    begun = max((at for at, event in enumerate(logged) if event["kind"] == "run"), default=0)
    same = logged[begun : begun + 1] == [json.loads(json.dumps(_run_event(job, method)))]
    return logged[begun:] if same else []


def step_flops(cost: Event) -> dict[tuple[int, int], int]:
    """FLOPs of an optimizer step, from the record `cost`, by the block that is visited and the layers left out."""
    grown = {(each["block"], each["left_out"]): each["flops"] for each in cost.get("growing", ())}
    return {(block, 0): flops for block, flops in enumerate(cost["flops"]["blocks"])} | grown


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
        "micro_rows": job.config.batch.micro_rows,
        "memory": to_mapping(job.config.memory),
        "layout": job.config.distributed.layout,
        "device": pick_device(job.config.device).type,
        "processes": job.ranks.size,
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
    batch = to_device(job.task.train.batch(range(job.micro_rows)), job.device)
    blocks = (job.partition.whole, *job.trained)
    steps = (counted_step(job, job.partition.whole, batch), *counted_steps(job, batch))
    layers = layer_costs(job.partition.chain, batch)
    full, *theory = [_of_all_rows(job, flops) for flops in _theory(job, blocks, batch, layers)]
    memory = [_memory_by_arithmetic(job, block, step) for block, step in zip(blocks, steps, strict=True)]
    return {
        "flops": {
            "full": _of_all_rows(job, steps[0].flops),
            "blocks": [_of_all_rows(job, step.flops) for step in steps[1:]],
            "theory_full": full,
            "theory_blocks": theory,
            "forward_layers": [_of_all_rows(job, layer.forward_flops) for layer in layers],
        },
        "memory": {"full": memory[0], "blocks": memory[1:]},
    }


def _growing(job: Job) -> dict[str, Any]:
    """FLOPs of an optimizer step in the visits that leave layers out."""
    found = []
    for visit, layers in growing_visits(job):
        batch = to_device(job.task.train.batch(range(job.micro_rows)), job.device)
        step = counted_step(job, visit.block, batch, without=layers)
        place = {"block": visit.block.index, "left_out": len(layers)}
        found.append({**place, "flops": _of_all_rows(job, step.flops)})
    return {"growing": found} if found else {}


def _of_all_rows(job: Job, flops: int) -> int:
    """From those of a micro-batch."""
    return flops * job.config.batch.rows // job.micro_rows


def counted_steps(job: Job, batch: Mapping[str, torch.Tensor]) -> list[StepCost]:
    """A forward and backward pass over `batch` in a visit to each block. Of blocks that are alike the lowest and the
    highest are counted: those between have their backward pass end at another layer, and nothing else is different."""

    def between(low: StepCost, high: StepCost, share: float) -> StepCost:
        return StepCost(
            flops=on_the_line(low.flops, high.flops, share),
            saved_bytes=on_the_line(low.saved_bytes, high.saved_bytes, share),
        )

    known = {end: counted_step(job, job.trained[end], batch) for end in ends(job.trained)}
    return filled(job.trained, job.partition.chain, known, between)


def counted_step(
    job: Job, block: Block, batch: Mapping[str, torch.Tensor], *, without: Collection[Layer] = ()
) -> StepCost:
    """The same with `block` active and the layers `without` left out, counted on a copy without memory."""
    activate(job.partition, block, frozen_dropout=job.config.blocks.frozen_dropout)
    with saving_memory(job.partition, job.config.memory), running_without(job, without):
        counter = StepCounter(job.model, batch)
    release(job.partition)
    return counter.measure(job.moved(block))


def _theory(
    job: Job, blocks: Sequence[Block], batch: Mapping[str, torch.Tensor], layers: tuple[LayerCost, ...]
) -> list[int]:
    """FLOPs by closed form, each block active. What a layer computes again depends on the mode it is in."""
    chain, shares = job.partition.chain, [_moved_shares(job, job.moved(block)) for block in blocks]
    if job.config.memory.checkpointing == "off":
        return [theoretical_step_flops(layers, mine) for mine in shares]
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
            mine,
            checkpointed=again,
        )
        for block, mine in zip(blocks, shares, strict=True)
    ]


def _memory_by_arithmetic(job: Job, block: Block, step: StepCost) -> dict[str, int]:
    scalars = block.num_parameters
    master = 4 * scalars if job.optimizer.precision.has_master else 0
    summed = master and job.micro_rows < job.rank_rows
    one_at_a_time = max if job.optimizer.in_backward else sum
    gradients = master if summed else one_at_a_time(p.nbytes for p in block.parameters.values())
    passing = max((p.nbytes for p in job.optimizer.tail_of(block).values()), default=0)  # of a tail, one at a time
    return {
        "weights": job.optimizer.weight_bytes(block) + sum(b.nbytes for b in job.model.buffers()),
        "master": master,
        "gradients": gradients + passing,
        "optimizer": job.optimizer.predicted_state_bytes(block),
        "activations": step.saved_bytes,
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

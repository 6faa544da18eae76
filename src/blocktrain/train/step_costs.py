"""What a run's first records say: what is trained, and what a step of it costs beside a step of full training.

FLOPs and bytes are counted, not estimated: on a copy of the model without memory, with each block active in turn,
and with everything active for comparison. The closed form stands beside the count. Runs of one process that cost the
same share their counts (`step_cost_cache.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from blocktrain.chain.block import Block
from blocktrain.chain.chain import Layer
from blocktrain.chain.checkpointing import checkpointed_layers
from blocktrain.chain.cost import LayerCost, layer_costs, theoretical_step_flops
from blocktrain.chain.freezing import activate, evaluating, release
from blocktrain.memory.flops import StepCost, StepCounter
from blocktrain.memory.tracker import Peak
from blocktrain.records.run_records import (
    BlockSummary,
    GrowingStep,
    MemoryPeaks,
    Opening,
    PeakMemory,
    RunHeader,
    StepCosts,
    StepFlops,
    StepMemory,
)
from blocktrain.runtime import pick_device, to_device
from blocktrain.train.auto_micro_batch import auto_micro_rows, step_shape
from blocktrain.train.context import TrainingContext
from blocktrain.train.interpolate_step_costs import interpolate, interpolate_missing, measured_positions
from blocktrain.train.predict_memory import predicted_peaks
from blocktrain.train.step_cost_cache import count_once
from blocktrain.train.techniques.growth import growing_visits, running_without
from blocktrain.train.techniques.memory_saving import saving_memory
from blocktrain.train.toml_dataclasses import to_mapping


def count_opening(context: TrainingContext, header: RunHeader, micro_rows: int | None = None) -> Opening:
    """The opening records of a run; `micro_rows` where an earlier session of it has decided on them already."""
    chosen = None
    if micro_rows is None and context.config.batch.micro_rows == "auto":
        chosen = auto_micro_rows(context)
        micro_rows = chosen.micro_rows
    if micro_rows is not None:
        context = replace(context, micro_rows=micro_rows)
    costs = count_once(_costs, context)
    return Opening(
        header=header,
        costs=replace(costs, growing=_growing_steps(context)),
        memory=count_once(_memory_peaks, context),
        micro_batch=chosen,
    )


def _memory_peaks(context: TrainingContext) -> MemoryPeaks:
    """Tracked peaks of one optimizer step, by part: in a visit to each block, and with all of them active."""
    step = step_shape(context, context.micro_rows)
    blocks = predicted_peaks(context.optimizer, step, blocks=context.trained)
    (full,) = predicted_peaks(context.optimizer, step, partition=context.partition.undivided)
    return MemoryPeaks(blocks=tuple(_record_of(peak) for peak in blocks), full=_record_of(full))


def _record_of(peak: Peak) -> PeakMemory:
    return PeakMemory(parts=dict(peak.parts), host_bytes=peak.host_bytes, operation=peak.operation)


def run_header(context: TrainingContext, method: str) -> RunHeader:
    """What is trained, and how; `method` is what the report calls it."""
    config = context.config
    return RunHeader(
        method=method,
        name=config.name,
        model=type(context.model).__name__,
        parameters=context.partition.num_parameters,
        unit=context.data.unit,
        tokens_per_step=context.geometry.tokens_per_step,
        rows_per_step=context.geometry.rows_per_step,
        steps_planned=context.total_steps,
        optimizer=config.optimizer.name,
        precision=config.precision,
        state=config.optimizer.state,
        micro_rows=config.batch.micro_rows,
        memory=to_mapping(config.memory),
        layout=config.distributed.layout,
        device=pick_device(config.device).type,
        processes=context.ranks.size,
        span=config.schedule.span,
        tail=config.optimizer.tail,
        blocks=tuple(
            BlockSummary(
                index=block.index,
                first=block.names[0],
                last=block.names[-1],
                layers=len(block.names),
                parameters=block.num_parameters,
            )
            for block in context.partition
        ),
    )


def _costs(context: TrainingContext) -> StepCosts:
    """FLOPs of an optimizer step over all its rows and bytes in one process: with all blocks active, and in a visit to
    each."""
    batch = to_device(context.data.train.batch(range(context.micro_rows)), context.device)
    blocks = (context.partition.whole, *context.trained)
    full, *steps = (counted_step(context, context.partition.whole, batch), *counted_steps(context, batch))
    layers = layer_costs(context.partition.chain, batch)
    theory_full, *theory_blocks = [_of_all_rows(context, flops) for flops in _theory(context, blocks, batch, layers)]
    memory = [_memory_by_arithmetic(context, block, step) for block, step in zip(blocks, (full, *steps), strict=True)]
    flops = StepFlops(
        full=_of_all_rows(context, full.flops),
        blocks=tuple(_of_all_rows(context, step.flops) for step in steps),
        theory_full=theory_full,
        theory_blocks=tuple(theory_blocks),
        forward_layers=tuple(_of_all_rows(context, layer.forward_flops) for layer in layers),
    )
    return StepCosts(flops=flops, memory=StepMemory(full=memory[0], blocks=tuple(memory[1:])))


def _growing_steps(context: TrainingContext) -> tuple[GrowingStep, ...]:
    """FLOPs of an optimizer step in the visits that leave layers out."""
    found = []
    for visit, layers in growing_visits(context):
        batch = to_device(context.data.train.batch(range(context.micro_rows)), context.device)
        step = counted_step(context, visit.block, batch, without=layers)
        flops = _of_all_rows(context, step.flops)
        found.append(GrowingStep(block=visit.block.index, left_out=len(layers), flops=flops))
    return tuple(found)


def _of_all_rows(context: TrainingContext, flops: int) -> int:
    """Scales the FLOPs of a micro-batch to the whole step."""
    return flops * context.config.batch.rows // context.micro_rows


def counted_steps(context: TrainingContext, batch: Mapping[str, torch.Tensor]) -> list[StepCost]:
    """A forward and backward pass over `batch` in a visit to each block. Of blocks that are alike the lowest and the
    highest are counted: those between have their backward pass end at another layer, and nothing else is different."""

    def between(low: StepCost, high: StepCost, share: float) -> StepCost:
        return StepCost(
            flops=interpolate(low.flops, high.flops, share),
            saved_bytes=interpolate(low.saved_bytes, high.saved_bytes, share),
        )

    known = {end: counted_step(context, context.trained[end], batch) for end in measured_positions(context.trained)}
    return interpolate_missing(context.trained, known, between)


def counted_step(
    context: TrainingContext, block: Block, batch: Mapping[str, torch.Tensor], *, without: Collection[Layer] = ()
) -> StepCost:
    """The same with `block` active and the layers `without` left out, counted on a copy without memory."""
    activate(context.partition, block, frozen_dropout=context.config.blocks.frozen_dropout)
    with saving_memory(context.partition, context.config.memory), running_without(context, without):
        counter = StepCounter(context.model, batch)
    release(context.partition)
    return counter.measure(context.updated_weights(block))


def _theory(
    context: TrainingContext, blocks: Sequence[Block], batch: Mapping[str, torch.Tensor], layers: tuple[LayerCost, ...]
) -> list[int]:
    """FLOPs by closed form, each block active. What a layer computes again depends on the mode it is in."""
    chain, shares = (
        context.partition.chain,
        [_updated_shares(context, context.updated_weights(block)) for block in blocks],
    )
    if context.config.memory.checkpointing == "off":
        return [theoretical_step_flops(layers, mine) for mine in shares]
    activate(context.partition, context.partition.whole)
    trained = layer_costs(chain, batch)
    release(context.partition)
    with evaluating(context.model):
        frozen = trained if context.config.blocks.frozen_dropout else layer_costs(chain, batch)
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


def _memory_by_arithmetic(context: TrainingContext, block: Block, step: StepCost) -> dict[str, int]:
    scalars = block.num_parameters
    master = 4 * scalars if context.optimizer.precision.has_master else 0
    summed = master and context.micro_rows < context.rank_rows
    one_at_a_time = max if context.optimizer.in_backward else sum
    gradients = master if summed else one_at_a_time(p.nbytes for p in block.parameters.values())
    passing = max((p.nbytes for p in context.optimizer.tail_of(block).values()), default=0)  # of a tail, one at a time
    return {
        "weights": context.optimizer.weight_bytes(block) + sum(b.nbytes for b in context.model.buffers()),
        "master": master,
        "gradients": gradients + passing,
        "moments": context.optimizer.predicted_state_bytes(block),
        "activations": step.saved_bytes,
    }


def _updated_shares(context: TrainingContext, updated: Collection[str]) -> dict[int, float]:
    """The share of its weights that get gradients, for each layer with a weight in `updated`.

    A matrix counts whole, even where the block owns only some of its rows.
    """
    shares = {}
    for index, owned in enumerate(context.partition.chain.owned):
        mine = sum(parameter.numel() for name, parameter in owned.items() if name in updated)
        if mine:
            shares[index] = mine / sum(parameter.numel() for parameter in owned.values())
    return shares

"""How a job's work is laid out over its processes, and how what they train comes together in a checkpoint.

        the model                          a step's rows      in a checkpoint
rows    whole on each process              shared out         as one process has it
layers  whole on each, run in stages       pass through all   of each parameter, what its stage has
shards  in equal parts                     shared out         parts put together
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from blocktrain.dist.local_steps import parallel
from blocktrain.dist.parallel import ByRows
from blocktrain.dist.pipeline import Pipeline
from blocktrain.dist.sharding import Sharded, ShardedSteps, ShardingConfig
from blocktrain.dist.stages import PipelineConfig
from blocktrain.optim.master import Remainders
from blocktrain.optim.precision import Precision
from blocktrain.optim.state import BlockState, decode_state, encode_state
from blocktrain.train.checkpoint import Trained
from blocktrain.train.job import Job, optimizer_of


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`job` as this process works on it. `collected(blocks)` is what a checkpoint is written of, with the tensors of
    these blocks on rank 0; all processes must call it."""

    job: Job
    parallel: ByRows | Pipeline
    collected: Callable[[Collection[int]], Trained]


def lay_out(job: Job, folder: Path, forward_flops: Sequence[int]) -> Layout:
    """As `[distributed]` says. `folder` is the run's; forward_flops: of each layer, to share them out by."""
    config, ranks = job.config.distributed, job.ranks
    if ranks.size > 1 and config.layout == "layers":
        start = "inputs" if job.config.prefix.store == "off" else "boundary"
        pipeline = Pipeline(
            ranks, job.partition, PipelineConfig(schedule=config.pipeline, start=start), costs=forward_flops
        )
        return Layout(job=job, parallel=pipeline, collected=lambda blocks: _from_stages(job, pipeline, blocks))
    if ranks.size > 1 and config.layout == "shards":
        compute = "fp32" if job.config.precision == "fp32" else "bf16"
        before = job.optimizer.state_dict()
        sharded = Sharded(ranks, job.partition, ShardingConfig(compute_dtype=compute, reduce_dtype=config.reduce_dtype))
        optimizer = optimizer_of(job.config, sharded.partition, folder, ranks)
        optimizer.load_state_dict(sharded.scattered(before))
        laid = replace(job, partition=sharded.partition, optimizer=optimizer)
        return Layout(
            job=laid, parallel=ShardedSteps(ranks, config), collected=lambda blocks: _from_parts(laid, sharded, blocks)
        )
    return Layout(job=job, parallel=parallel(ranks, config), collected=lambda _: job.optimizer)


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What was collected of some blocks, as a `Trained`; of the others it knows only what there is."""

    precision: Precision
    changed_at: list[int]
    place: dict[str, Any]
    stateful: list[bool]
    remaindered: list[bool]
    weights: dict[int, dict[str, Tensor]]
    states: dict[int, BlockState]
    remainders: dict[int, Remainders]

    def position(self) -> dict[str, Any]:
        """Of the optimizers, the same on all processes."""
        return self.place

    def block_weights(self, index: int) -> dict[str, Tensor]:
        """Of a block that was collected."""
        return self.weights[index]

    def has_state(self, index: int) -> bool:
        """On any process."""
        return self.stateful[index]

    def block_state(self, index: int) -> BlockState | None:
        """Of a block that was collected."""
        return self.states[index]

    def has_remainders(self, index: int) -> bool:
        """On any process."""
        return self.remaindered[index]

    def block_remainders(self, index: int) -> Remainders:
        """Of a block that was collected."""
        return self.remainders[index]


def _from_stages(job: Job, pipeline: Pipeline, blocks: Collection[int]) -> Trained:
    """Weights are everywhere once the pipeline has settled; state and remainders come from who trains them."""
    pipeline.settle()
    optimizer, ranks = job.optimizer, job.ranks
    there = [[optimizer.has_state(index), optimizer.has_remainders(index)] for index in range(len(job.partition))]
    told = ranks.gather([float(flag) for flags in there for flag in flags])
    anywhere = [any(flags) for flags in zip(*told, strict=True)]
    states: dict[int, BlockState] = {}
    remainders: dict[int, Remainders] = {}
    for index in blocks:
        mine = {name for name in job.partition[index].parameters if pipeline.holds(index, name)}
        state = {name: entries for name, entries in (optimizer.block_state(index) or {}).items() if name in mine}
        left = {name: value for name, value in optimizer.block_remainders(index).items() if name in mine}
        states[index] = _joined(decode_state(data) for data in ranks.to_first(encode_state(state)))
        remainders[index] = _joined(load(data) for data in ranks.to_first(save(left)))
    return Collected(
        precision=optimizer.precision,
        changed_at=optimizer.changed_at,
        place=optimizer.position(),
        stateful=anywhere[0::2],
        remaindered=anywhere[1::2],
        weights={index: optimizer.block_weights(index) for index in blocks},
        states=states,
        remainders=remainders,
    )


def _joined(parts):
    return {name: value for part in parts for name, value in part.items()}


def _from_parts(job: Job, sharded: Sharded, blocks: Collection[int]) -> Trained:
    """Weights and state put together, parameter by parameter."""
    optimizer, every = job.optimizer, range(len(job.partition))
    held = {index: state for index in blocks if (state := optimizer.block_state(index)) is not None}
    return Collected(
        precision=optimizer.precision,
        changed_at=optimizer.changed_at,
        place=optimizer.position(),
        stateful=[optimizer.has_state(index) for index in every],
        remaindered=[False for _ in every],
        weights={index: sharded.full_weights(job.partition[index]) for index in blocks},
        states=sharded.gathered({"blocks": held})["blocks"],
        remainders={},
    )

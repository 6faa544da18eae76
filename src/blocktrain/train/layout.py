"""How a job's work is laid out over its processes, and how what they train comes together in a checkpoint.

            the model                          a step's rows      in a checkpoint
    rows    whole on each process              shared out         as one process has it
    layers  whole on each, run in stages       pass through all   of each parameter, what its stage has
    shards  in equal parts                     shared out         parts put together

Rank 0 writes a checkpoint block by block, and asks for each block's tensors as it comes to it (`Collected.fetch`); the
others go through the same blocks in the same order. So no process holds more than one block of what others have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors.torch import load, save
from torch import Tensor

from blocktrain.dist.local_steps import parallel
from blocktrain.dist.parallel import ByRows
from blocktrain.dist.pipeline import Pipeline
from blocktrain.dist.sharding import Sharded, ShardedSteps, ShardingConfig
from blocktrain.optim.master import Remainders
from blocktrain.optim.precision import Precision
from blocktrain.optim.state import BlockState, decode_state, encode_state
from blocktrain.runtime import pick_device
from blocktrain.train.checkpoint import Saved, Trained, blocks_to_write, save_checkpoint
from blocktrain.train.job import Job, in_parts, in_stages, optimizer_of, pipeline_config

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`job` as this process works on it. `trained` is what a checkpoint is written of, as it is now; all processes must
    call it."""

    job: Job
    parallel: ByRows | Pipeline
    trained: Callable[[], Trained]


def lay_out(job: Job, folder: Path, forward_flops: Sequence[int]) -> Layout:
    """As `[distributed]` says. `folder` is the run's; forward_flops: of each layer, to share them out by."""
    config, ranks = job.config.distributed, job.ranks
    if in_stages(job.config, ranks):
        pipeline = Pipeline(ranks, job.partition, pipeline_config(job.config), costs=forward_flops)
        return Layout(job=job, parallel=pipeline, trained=lambda: FromStages(job, pipeline))
    if in_parts(job.config, ranks):
        device, before = pick_device(job.config.device), job.optimizer.state_dict()
        compute = "fp32" if job.config.precision == "fp32" else "bf16"
        settings = ShardingConfig(compute_dtype=compute, reduce_dtype=config.reduce_dtype)
        sharded = Sharded(ranks, job.partition, settings, device=device)
        optimizer = optimizer_of(job.config, sharded.partition, folder, ranks)
        optimizer.load_state_dict(sharded.scattered(before))
        laid = replace(job, partition=sharded.partition, optimizer=optimizer, device=device)
        return Layout(job=laid, parallel=ShardedSteps(ranks, config), trained=lambda: FromParts(laid, sharded))
    return Layout(job=job, parallel=parallel(ranks, config), trained=lambda: job.optimizer)


def write_checkpoint(layout: Layout, folder: Path, saved: Saved, *, keep: int) -> None:
    """As `save_checkpoint`, on rank 0; the other processes hand over what they have. All must call it."""
    job, trained, step = layout.job, layout.trained(), saved.progress.step
    if isinstance(trained, Collected):
        wanted = job.ranks.first(lambda: blocks_to_write(folder, step, partition=job.partition, trained=trained))
        if not job.ranks.is_first:
            for index in wanted:
                trained.fetch(index)
    if job.ranks.is_first:
        save_checkpoint(folder, saved, partition=job.partition, trained=trained, keep=keep)


class Contents(NamedTuple):
    """What a checkpoint has of a block."""

    weights: Mapping[str, Tensor]
    state: BlockState
    remainders: Remainders


class Collected(ABC):
    """The optimizers of all processes as one (`Trained`). All processes must make it."""

    def __init__(self, job: Job):
        self.job = job
        self._last: tuple[int, Contents] | None = None
        optimizer, every = job.optimizer, range(len(job.partition))
        mine = [flag for index in every for flag in (optimizer.has_state(index), optimizer.has_remainders(index))]
        anywhere = [any(flags) for flags in zip(*job.ranks.gather([float(flag) for flag in mine]), strict=True)]
        self._stateful, self._remaindered = anywhere[0::2], anywhere[1::2]

    @abstractmethod
    def collect(self, index: int) -> Contents:
        """Block `index`'s, whole on rank 0. All processes must call this together."""

    def fetch(self, index: int) -> Contents:
        """The same, of the block last fetched without asking again."""
        if self._last is None or self._last[0] != index:
            self._last = None  # one block at a time
            self._last = (index, self.collect(index))
        return self._last[1]

    @property
    def precision(self) -> Precision:
        """The optimizers'."""
        return self.job.optimizer.precision

    @property
    def changed_at(self) -> list[int]:
        """The same on all processes."""
        return self.job.optimizer.changed_at

    def position(self) -> dict[str, Any]:
        """The same on all processes."""
        return self.job.optimizer.position()

    def block_weights(self, index: int) -> Mapping[str, Tensor]:
        """Fetched."""
        return self.fetch(index).weights

    def has_state(self, index: int) -> bool:
        """On any process."""
        return self._stateful[index]

    def block_state(self, index: int) -> BlockState | None:
        """Fetched."""
        return self.fetch(index).state

    def has_remainders(self, index: int) -> bool:
        """On any process."""
        return self._remaindered[index]

    def block_remainders(self, index: int) -> Remainders:
        """Fetched."""
        return self.fetch(index).remainders


class FromStages(Collected):
    """Weights are everywhere once the pipeline has settled; state and remainders come from who trains them."""

    def __init__(self, job: Job, pipeline: Pipeline):
        pipeline.settle()
        super().__init__(job)
        self.pipeline = pipeline

    def collect(self, index: int) -> Contents:
        """See `Collected`."""
        optimizer, ranks = self.job.optimizer, self.job.ranks
        mine = {name for name in self.job.partition[index].parameters if self.pipeline.holds(index, name)}
        state = {name: entries for name, entries in (optimizer.block_state(index) or {}).items() if name in mine}
        left = {name: value for name, value in optimizer.block_remainders(index).items() if name in mine}
        return Contents(
            optimizer.block_weights(index) if ranks.is_first else {},
            _joined(decode_state(data) for data in ranks.to_first(encode_state(state))),
            _joined(load(data) for data in ranks.to_first(save(left))),
        )


class FromParts(Collected):
    """Weights and state are put together parameter by parameter, on every process, for gathering has no one end."""

    def __init__(self, job: Job, sharded: Sharded):
        super().__init__(job)
        self.sharded = sharded

    def collect(self, index: int) -> Contents:
        """See `Collected`."""
        state = self.sharded.gathered({"blocks": {index: self.job.optimizer.block_state(index) or {}}})
        return Contents(self.sharded.full_weights(self.job.partition[index]), state["blocks"][index], {})


def _joined(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for part in parts for name, value in part.items()}

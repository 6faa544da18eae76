"""How a context's work is laid out over its processes, and how what they train comes together in a checkpoint.

              the model                          a step's rows       in a checkpoint
    data      whole on each process              split over ranks    as one process has it
    pipeline  whole on each, run in stages       pass through all    each parameter from a rank that runs it
    fsdp      sharded                            split over ranks    shards gathered

Rank 0 writes a checkpoint block by block, and asks for each block's tensors as it comes to it (`GatheredState.fetch`);
the others go through the same blocks in the same order. So no process holds more than one block of what others have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors.torch import load, save
from torch import Tensor

from blocktrain.contrib.local_sgd import LocalSGD
from blocktrain.optim.master import LowBits
from blocktrain.optim.precision import Precision
from blocktrain.optim.state import BlockState, decode_state, encode_state
from blocktrain.parallel.config import DistributedConfig, ShardingConfig
from blocktrain.parallel.data_parallel import DataParallel
from blocktrain.parallel.fsdp import ShardedDataParallel, ShardedPartition
from blocktrain.parallel.pipeline import Pipeline
from blocktrain.parallel.protocol import BatchParallel
from blocktrain.parallel.ranks import Ranks
from blocktrain.runtime import pick_device
from blocktrain.train.checkpoint import CheckpointHeader, CheckpointSource, blocks_to_write, save_checkpoint
from blocktrain.train.context import TrainingContext, is_pipeline, is_sharded, optimizer_of, pipeline_config

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`context` as this process works on it. `trained` returns what a checkpoint is written from. Collective: every
    rank must call it."""

    context: TrainingContext
    parallel: BatchParallel | Pipeline
    trained: Callable[[], CheckpointSource]


def lay_out(context: TrainingContext, folder: Path, forward_flops: Sequence[int]) -> Layout:
    """As `[distributed]` says. `folder` is the run's; forward_flops: of each layer, to share them out by."""
    config, ranks = context.config.distributed, context.ranks
    if is_pipeline(context.config, ranks):
        pipeline = Pipeline(ranks, context.partition, pipeline_config(context.config), costs=forward_flops)
        return Layout(context=context, parallel=pipeline, trained=lambda: GatheredFromStages(context, pipeline))
    if is_sharded(context.config, ranks):
        device, before = pick_device(context.config.device), context.optimizer.state_dict()
        compute = "fp32" if context.config.precision == "fp32" else "bf16"
        settings = ShardingConfig(compute_dtype=compute, reduce_dtype=config.reduce_dtype)
        sharded = ShardedPartition(ranks, context.partition, settings, device=device)
        optimizer = optimizer_of(context.config, sharded.partition, folder, ranks)
        optimizer.load_state_dict(sharded.shard_state(before))
        laid = replace(context, partition=sharded.partition, optimizer=optimizer, device=device)
        return Layout(
            context=laid, parallel=ShardedDataParallel(ranks, config), trained=lambda: GatheredFromShards(laid, sharded)
        )
    return Layout(context=context, parallel=data_parallel(ranks, config), trained=lambda: context.optimizer)


def data_parallel(ranks: Ranks, config: DistributedConfig) -> BatchParallel:
    """Data parallel training with gradients summed in each step, or with local steps where `sync_every` is set."""
    return DataParallel(ranks, config) if config.sync_every is None else LocalSGD(ranks, config)


def write_checkpoint(layout: Layout, folder: Path, saved: CheckpointHeader, *, keep: int) -> None:
    """As `save_checkpoint`, on rank 0; the other processes hand over what they have. All must call it."""
    context, trained, step = layout.context, layout.trained(), saved.progress.step
    if isinstance(trained, GatheredState):
        wanted = context.ranks.rank0_broadcast(
            lambda: blocks_to_write(folder, step, partition=context.partition, trained=trained)
        )
        if not context.ranks.is_rank0:
            for index in wanted:
                trained.fetch(index)
    if context.ranks.is_rank0:
        save_checkpoint(folder, saved, partition=context.partition, trained=trained, keep=keep)


class BlockContents(NamedTuple):
    """What a checkpoint has of a block."""

    weights: Mapping[str, Tensor]
    state: BlockState
    low_bits: LowBits


class GatheredState(ABC):
    """The optimizers of all processes as one (`CheckpointSource`). All processes must make it."""

    def __init__(self, context: TrainingContext):
        self.context = context
        self._last: tuple[int, BlockContents] | None = None
        optimizer, every = context.optimizer, range(len(context.partition))
        mine = [flag for index in every for flag in (optimizer.has_state(index), optimizer.has_low_bits(index))]
        anywhere = [any(flags) for flags in zip(*context.ranks.all_gather([float(flag) for flag in mine]), strict=True)]
        self._stateful, self._remaindered = anywhere[0::2], anywhere[1::2]

    @abstractmethod
    def collect(self, index: int) -> BlockContents:
        """Block `index`'s, whole on rank 0. All processes must call this together."""

    def fetch(self, index: int) -> BlockContents:
        """The same, of the block last fetched without asking again."""
        if self._last is None or self._last[0] != index:
            self._last = None  # one block at a time
            self._last = (index, self.collect(index))
        return self._last[1]

    @property
    def precision(self) -> Precision:
        """The optimizers'."""
        return self.context.optimizer.precision

    @property
    def changed_at(self) -> list[int]:
        """The same on all processes."""
        return self.context.optimizer.changed_at

    def position(self) -> dict[str, Any]:
        """The same on all processes."""
        return self.context.optimizer.position()

    def block_weights(self, index: int) -> Mapping[str, Tensor]:
        """Fetched."""
        return self.fetch(index).weights

    def has_state(self, index: int) -> bool:
        """On any process."""
        return self._stateful[index]

    def block_state(self, index: int) -> BlockState | None:
        """Fetched."""
        return self.fetch(index).state

    def has_low_bits(self, index: int) -> bool:
        """On any process."""
        return self._remaindered[index]

    def block_low_bits(self, index: int) -> LowBits:
        """Fetched."""
        return self.fetch(index).low_bits


class GatheredFromStages(GatheredState):
    """Weights are everywhere once the pipeline has synchronized them; state and low_bits come from who trains them."""

    def __init__(self, context: TrainingContext, pipeline: Pipeline):
        pipeline.sync_weights()
        super().__init__(context)
        self.pipeline = pipeline

    def collect(self, index: int) -> BlockContents:
        """See `GatheredState`."""
        optimizer, ranks = self.context.optimizer, self.context.ranks
        mine = {name for name in self.context.partition[index].parameters if self.pipeline.provides_state(index, name)}
        state = {name: entries for name, entries in (optimizer.block_state(index) or {}).items() if name in mine}
        left = {name: value for name, value in optimizer.block_low_bits(index).items() if name in mine}
        return BlockContents(
            optimizer.block_weights(index) if ranks.is_rank0 else {},
            _joined(decode_state(data) for data in ranks.gather_bytes(encode_state(state))),
            _joined(load(data) for data in ranks.gather_bytes(save(left))),
        )


class GatheredFromShards(GatheredState):
    """Weights and state are put together parameter by parameter, on every process, for gathering has no one end."""

    def __init__(self, context: TrainingContext, sharded: ShardedPartition):
        super().__init__(context)
        self.sharded = sharded

    def collect(self, index: int) -> BlockContents:
        """See `GatheredState`."""
        state = self.sharded.gather_state({"blocks": {index: self.context.optimizer.block_state(index) or {}}})
        return BlockContents(self.sharded.gather_weights(self.context.partition[index]), state["blocks"][index], {})


def _joined(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for part in parts for name, value in part.items()}

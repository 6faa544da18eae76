"""What several ranks train, gathered for a checkpoint.

    layout      the model                          a step's rows      in a checkpoint
    data        whole on each rank                 divided            as rank 0 has it
    pipeline    whole on each, run in stages       pass through all   each parameter from the stage that trains it
    fsdp        sharded over the ranks             divided            shards put together

Rank 0 writes a checkpoint block by block and fetches each block's tensors when it comes to it; the other ranks go
through the same blocks in the same order. So rank 0 never holds more than one gathered block at a time, and the other
ranks hold no gathered data. Why shards are not written by `torch.distributed.checkpoint`:
docs/decisions/0021-whole-checkpoints.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors.torch import load, save
from torch import Tensor

from blocktrain.optim.master import LowBits
from blocktrain.optim.precision import Precision
from blocktrain.optim.state_store import BlockState, decode_state, encode_state
from blocktrain.parallel.fsdp import ShardedPartition
from blocktrain.parallel.pipeline import Pipeline
from blocktrain.train.checkpoint import CheckpointHeader, CheckpointSource, blocks_to_write, save_checkpoint
from blocktrain.train.context import TrainingContext

T = TypeVar("T")


def write_checkpoint(
    context: TrainingContext, source: CheckpointSource, folder: Path, header: CheckpointHeader
) -> None:
    """`save_checkpoint` on rank 0; the other ranks hand over what they have. Collective."""
    ranks, partition, step, kept = context.ranks, context.partition, header.progress.step, context.config.checkpoint
    if isinstance(source, GatheredState):
        wanted = ranks.rank0_broadcast(lambda: blocks_to_write(folder, step, partition=partition, trained=source))
        if not ranks.is_rank0:
            for index in wanted:
                source.fetch(index)
    if ranks.is_rank0:
        save_checkpoint(folder, header, partition=partition, trained=source, keep=kept.keep, keep_best=kept.keep_best)


class BlockContents(NamedTuple):
    """What a checkpoint has of a block."""

    weights: Mapping[str, Tensor]
    state: BlockState
    low_bits: LowBits


class GatheredState(ABC):
    """The optimizers of all ranks as one `CheckpointSource`. Collective: every rank must create one."""

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
        """Like `collect`; the block that was fetched last is kept."""
        if self._last is None or self._last[0] != index:
            self._last = None  # one block at a time
            self._last = (index, self.collect(index))
        return self._last[1]

    @property
    def precision(self) -> Precision:
        """The precision of the optimizers."""
        return self.context.optimizer.precision

    @property
    def changed_at(self) -> list[int]:
        """See `CheckpointSource`; equal on all ranks."""
        return self.context.optimizer.changed_at

    def progress(self) -> dict[str, Any]:
        """See `CheckpointSource`; equal on all ranks."""
        return self.context.optimizer.progress()

    def block_weights(self, index: int) -> Mapping[str, Tensor]:
        """See `CheckpointSource`; fetched from the ranks that have it."""
        return self.fetch(index).weights

    def has_state(self, index: int) -> bool:
        """Whether any rank has one."""
        return self._stateful[index]

    def block_state(self, index: int) -> BlockState | None:
        """See `CheckpointSource`; fetched from the ranks that have it."""
        return self.fetch(index).state

    def has_low_bits(self, index: int) -> bool:
        """Whether any rank has one."""
        return self._remaindered[index]

    def block_low_bits(self, index: int) -> LowBits:
        """See `CheckpointSource`; fetched from the ranks that have it."""
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
    """Each weight and each tensor of the state is put together on rank 0; the other ranks send their shards."""

    def __init__(self, context: TrainingContext, sharded: ShardedPartition):
        super().__init__(context)
        self.sharded = sharded

    def collect(self, index: int) -> BlockContents:
        """See `GatheredState`."""
        state = self.sharded.gather_state({"blocks": {index: self.context.optimizer.block_state(index) or {}}})
        return BlockContents(self.sharded.gather_weights(self.context.partition[index]), state["blocks"][index], {})


def _joined(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for part in parts for name, value in part.items()}

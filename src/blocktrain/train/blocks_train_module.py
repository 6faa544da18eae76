"""The train module of block coordinate descent: a `BlockOptimizer`, its ranks, and how rows pass through the model.

layout      parallel                  forward and backward pass
data        DataParallel, LocalSGD    rank_passes: this rank's rows through the whole model
fsdp        ShardedDataParallel       rank_passes, with weights that are gathered layer by layer
pipeline    Pipeline                  pipeline_passes: all rows through this rank's layers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from blocktrain.contrib.local_sgd import LocalSGD
from blocktrain.data.sampling import StepRows
from blocktrain.parallel.config import DistributedConfig, ShardingConfig
from blocktrain.parallel.data_parallel import DataParallel
from blocktrain.parallel.fsdp import ShardedDataParallel, ShardedPartition
from blocktrain.parallel.pipeline import Pipeline
from blocktrain.parallel.protocol import BatchParallel, Parallel
from blocktrain.parallel.ranks import Ranks
from blocktrain.records.run_records import Opening
from blocktrain.runtime import pick_device
from blocktrain.schedule import Visit
from blocktrain.train.checkpoint import CheckpointSource
from blocktrain.train.context import TrainingContext, is_pipeline, is_sharded, optimizer_of, pipeline_config
from blocktrain.train.forward_backward import pipeline_passes, rank_passes
from blocktrain.train.gathered_state import GatheredFromShards, GatheredFromStages
from blocktrain.train.step_costs import count_opening, run_header
from blocktrain.train.techniques import build_techniques
from blocktrain.train.techniques.prefix_caching import PrefixCaching
from blocktrain.train.train_module import Prepared, Setup


class BlocksModule:
    """Trains one block at a time. See `TrainModule` for its members.

    passes: becomes `forward_backward`. source: becomes `checkpoint_source`.
    """

    def __init__(
        self,
        context: TrainingContext,
        parallel: Parallel,
        *,
        passes: Callable[[StepRows, StepRows], list[Tensor | float]],
        source: Callable[[], CheckpointSource],
    ):
        self.model = context.model
        self.checkpoint_source = source
        self.forward_backward = passes
        self._optimizer = context.optimizer
        self._parallel = parallel

    @property
    def is_settled(self) -> bool:
        """See `TrainModule`."""
        return self._parallel.in_sync

    @contextmanager
    def visit(self, visit: Visit, following: Visit | None) -> Iterator[None]:
        """See `TrainModule`."""
        block = self._parallel.local_block(visit.block)
        with self._optimizer.visit(block), self._parallel.visit(self._optimizer.active_block):
            if following is not None:
                self._optimizer.prefetch_state(following.block)
            yield

    def begin_step(self, step: int, lr_factor: float) -> None:
        """See `TrainModule`."""
        self._optimizer.scale_learning_rate(lr_factor)

    def clip_grad_norm(self, max_norm: float) -> Tensor | float:
        """See `TrainModule`."""
        return self._parallel.clip_grad_norm(max_norm)

    def update(self, step: int) -> None:
        """See `TrainModule`."""
        self._optimizer.step()
        self.discard(step)

    def discard(self, step: int) -> None:
        """See `TrainModule`."""
        self._optimizer.zero_grad()
        self._parallel.after_step(step)

    def trained_buffers(self) -> Iterator[Tensor]:
        """See `TrainModule`."""
        block = self._optimizer.block
        for module in block.modules() if block is not None else ():
            yield from module.buffers()

    def settle(self) -> None:
        """See `TrainModule`."""
        self._parallel.sync_weights()

    def state_bytes(self) -> int:
        """See `TrainModule`."""
        return self._optimizer.state_bytes()


def prepare(context: TrainingContext, opening: Opening, folder: Path) -> Prepared:
    """The module for the run's layout, see `Setup`. Collective."""
    if is_sharded(context.config, context.ranks):
        return _sharded(context, opening, folder)
    techniques = build_techniques(context, opening, folder)
    if is_pipeline(context.config, context.ranks):
        costs = opening.costs.flops.forward_layers
        pipeline = Pipeline(context.ranks, context.partition, pipeline_config(context.config), costs=costs)
        found = techniques.by_name.get("prefix_cache")
        prefix = found if isinstance(found, PrefixCaching) else None
        passes = partial(pipeline_passes, context, pipeline, prefix)
        source = partial(GatheredFromStages, context, pipeline)
        module = BlocksModule(context, pipeline, passes=passes, source=source)
    else:
        parallel = data_parallel(context.ranks, context.config.distributed)
        passes = partial(rank_passes, context, parallel, techniques)
        module = BlocksModule(context, parallel, passes=passes, source=lambda: context.optimizer)
    return Prepared(context=context, module=module, techniques=techniques)


def _sharded(context: TrainingContext, opening: Opening, folder: Path) -> Prepared:
    """Each rank holds a shard of every weight."""
    device, before = pick_device(context.config.device), context.optimizer.state_dict()
    sharding = ShardingConfig(
        compute_dtype="fp32" if context.config.precision == "fp32" else "bf16",
        reduce_dtype=context.config.distributed.reduce_dtype,
    )
    sharded = ShardedPartition(context.ranks, context.partition, sharding, device=device)
    optimizer = optimizer_of(context.config, sharded.partition, folder, context.ranks)
    optimizer.load_state_dict(sharded.shard_state(before))
    sharded_context = replace(context, partition=sharded.partition, optimizer=optimizer, device=device)
    techniques = build_techniques(sharded_context, opening, folder)
    parallel = ShardedDataParallel(context.ranks, context.config.distributed)
    passes = partial(rank_passes, sharded_context, parallel, techniques)
    source = partial(GatheredFromShards, sharded_context, sharded)
    module = BlocksModule(sharded_context, parallel, passes=passes, source=source)
    return Prepared(context=sharded_context, module=module, techniques=techniques)


def data_parallel(ranks: Ranks, config: DistributedConfig) -> BatchParallel:
    """Data parallel training with gradients summed in each step, or with local steps where `sync_every` is set."""
    return DataParallel(ranks, config) if config.sync_every is None else LocalSGD(ranks, config)


# Block coordinate descent, and with one block full training.
BLOCKS = Setup(header=run_header, opening=count_opening, prepare=prepare)

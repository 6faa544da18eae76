"""The train module of block coordinate descent: a `BlockOptimizer`, its ranks, and how rows pass through the model.

layout                 parallel                    passes
data                   DataParallel or LocalSGD    RankPasses: this rank's rows through the whole model
fsdp                   ShardedDataParallel                   RankPasses, whose weights are gathered layer by layer
pipeline               Pipeline                    PipelinePasses: all rows through this rank's layers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from blocktrain.contrib.local_sgd import LocalSGD
from blocktrain.data.sampling import StepRows
from blocktrain.parallel.config import DistributedConfig, ShardingConfig
from blocktrain.parallel.data_parallel import DataParallel
from blocktrain.parallel.fsdp import ShardedDataParallel, ShardedPartition
from blocktrain.parallel.pipeline import Pipeline
from blocktrain.parallel.protocol import BatchParallel, Parallel
from blocktrain.parallel.ranks import Ranks
from blocktrain.records.run_records import Opening, RunHeader
from blocktrain.runtime import pick_device
from blocktrain.schedule import Visit
from blocktrain.train.checkpoint import CheckpointSource
from blocktrain.train.context import TrainingContext, is_pipeline, is_sharded, optimizer_of, pipeline_config
from blocktrain.train.forward_backward import Passes, PipelinePasses, RankPasses
from blocktrain.train.gathered_state import GatheredFromShards, GatheredFromStages
from blocktrain.train.step_costs import count_opening, run_header
from blocktrain.train.techniques import build_techniques
from blocktrain.train.techniques.prefix_caching import PrefixCaching
from blocktrain.train.train_module import Prepared


class BlocksModule:
    """Trains one block at a time. See `TrainModule` for its methods.

    source: makes what a checkpoint is written from. Collective.
    """

    def __init__(
        self, context: TrainingContext, parallel: Parallel, passes: Passes, source: Callable[[], CheckpointSource]
    ):
        self.context = context
        self.checkpoint_source = source
        self._optimizer = context.optimizer
        self._parallel = parallel
        self._passes = passes

    @property
    def model(self) -> nn.Module:
        """See `TrainModule`."""
        return self.context.model

    @property
    def is_settled(self) -> bool:
        """See `TrainModule`."""
        return self._parallel.in_sync

    @property
    def active_block(self) -> int | None:
        """See `TrainModule`."""
        return None if self._optimizer.block is None else self._optimizer.block.index

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

    def forward_backward(self, rows: StepRows, following: StepRows) -> float:
        """See `TrainModule`."""
        return self._passes.forward_backward(rows, following)

    def clip_grad_norm(self, max_norm: float) -> float:
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


@dataclass(frozen=True)
class BlocksSetup:
    """Block coordinate descent, and with one block full training. See `Setup`."""

    def header(self, context: TrainingContext, method: str) -> RunHeader:
        """See `Setup`."""
        return run_header(context, method)

    def opening(self, context: TrainingContext, header: RunHeader, micro_rows: int | None) -> Opening:
        """See `Setup`."""
        return count_opening(context, header, micro_rows)

    def prepare(self, context: TrainingContext, opening: Opening, folder: Path) -> Prepared:
        """See `Setup`."""
        if is_pipeline(context.config, context.ranks):
            return _pipeline(context, opening, folder)
        if is_sharded(context.config, context.ranks):
            return _sharded(context, opening, folder)
        techniques = build_techniques(context, opening, folder)
        parallel = data_parallel(context.ranks, context.config.distributed)
        module = BlocksModule(
            context, parallel, RankPasses(context, parallel, techniques), source=lambda: context.optimizer
        )
        return Prepared(context=context, module=module, techniques=techniques)


def _pipeline(context: TrainingContext, opening: Opening, folder: Path) -> Prepared:
    """Each rank runs some of the layers."""
    techniques = build_techniques(context, opening, folder)
    costs = opening.costs.flops.forward_layers
    pipeline = Pipeline(context.ranks, context.partition, pipeline_config(context.config), costs=costs)
    prefix = techniques.by_name.get("prefix_cache")
    passes = PipelinePasses(context, pipeline, prefix if isinstance(prefix, PrefixCaching) else None)
    module = BlocksModule(context, pipeline, passes, source=lambda: GatheredFromStages(context, pipeline))
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
    passes = RankPasses(sharded_context, parallel, techniques)
    source = partial(GatheredFromShards, sharded_context, sharded)
    module = BlocksModule(sharded_context, parallel, passes, source=source)
    return Prepared(context=sharded_context, module=module, techniques=techniques)


def data_parallel(ranks: Ranks, config: DistributedConfig) -> BatchParallel:
    """Data parallel training with gradients summed in each step, or with local steps where `sync_every` is set."""
    return DataParallel(ranks, config) if config.sync_every is None else LocalSGD(ranks, config)

"""What a run of block coordinate descent is made of: its opening records, and its module for the configured layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from blocktrain.contrib.local_sgd import LocalSGD
from blocktrain.parallel.config import DistributedConfig, ShardingConfig
from blocktrain.parallel.data_parallel import DataParallel
from blocktrain.parallel.fsdp import ShardedDataParallel, ShardedPartition
from blocktrain.parallel.pipeline import Pipeline
from blocktrain.parallel.protocol import BatchParallel
from blocktrain.parallel.ranks import Ranks
from blocktrain.records.run_records import RunHeader
from blocktrain.runtime import pick_device
from blocktrain.train.blocks_train_module import BlocksModule
from blocktrain.train.context import TrainingContext, is_pipeline, is_sharded, optimizer_of, pipeline_config
from blocktrain.train.forward_backward import PipelinePasses, RankPasses
from blocktrain.train.gathered_state import GatheredFromShards, GatheredFromStages
from blocktrain.train.opening_records import Opening
from blocktrain.train.step_costs import count_opening, run_header
from blocktrain.train.technique import build_techniques
from blocktrain.train.techniques.prefix_caching import PrefixCaching
from blocktrain.train.train_module import Prepared


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

"""Builds what a run needs from its configuration, and refuses what cannot work before the first step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blocktrain.chain.block import Block, Partition
from blocktrain.chain.freezing import evaluating
from blocktrain.chain.model_loading import ModelConfig, load_model
from blocktrain.chain.partition import partition_by_config
from blocktrain.contrib.identity_layers import IdentityLayers
from blocktrain.contrib.learning_tail import Tail
from blocktrain.data.chat import ChatRows
from blocktrain.data.facts import DataFacts
from blocktrain.data.kinds import TrainingData
from blocktrain.data.sampling import RowPlan, ShuffledRows
from blocktrain.data.tokenizer import Tokenizer
from blocktrain.errors import ConfigError, DataError
from blocktrain.modules.chunked_loss import check_chunked
from blocktrain.modules.kernels import choose_kernels
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.factory import find_optimizer_class, norms_and_biases, nothing, require_options
from blocktrain.optim.precision import FP32, preset
from blocktrain.optim.state_store import make_state_store
from blocktrain.optim.weight_store import OnDevice, OnHost
from blocktrain.parallel.config import PipelineConfig
from blocktrain.parallel.fsdp import require_shardable
from blocktrain.parallel.ranks import Ranks
from blocktrain.parallel.stages import require_stages
from blocktrain.runtime import pick_device, seed_everything, to_device
from blocktrain.schedule import Schedule
from blocktrain.stopping import FullLength, VisitRule
from blocktrain.train.config import RunConfig
from blocktrain.units import BatchGeometry


@torch.no_grad()
def require_separate_conversations(model: nn.Module, data: TrainingData) -> None:
    """Raise `ConfigError` if `model` lets conversations that are packed into one row see each other.

    Compares the logits of one row with those of the same row with other tokens in its first conversation: architectures
    that build their masks without position ids (OPT, BLOOM and Falcon in transformers 5.23) take such a row for one
    text. Both passes have the same shapes, so low precision rounds alike and hides nothing.
    """
    rows = data.train
    if not isinstance(rows, ChatRows) or rows.layout != "packed":
        return
    packed = next((index for index in range(len(rows)) if len(rows.conversations(index)) > 1), None)
    if packed is None:
        return
    row, first = rows.batch([packed]), len(rows.conversations(packed)[0])
    end = sum(len(ids) for ids in rows.conversations(packed))
    ids = row["input_ids"]
    vocabulary = int(ids.max()) + 1
    changed = {**row, "input_ids": torch.cat([(ids[:, :first] + 1) % vocabulary, ids[:, first:]], 1)}
    device = next(model.parameters()).device
    with evaluating(model):
        logits, others = (model(**to_device(batch, device)).logits[0, first:end] for batch in (row, changed))
    if not torch.allclose(logits, others, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
        raise ConfigError(
            f"{type(model).__name__} does not keep the conversations of a packed row apart (its masks do not "
            "follow from position ids); set chat.layout = 'padded'"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingContext:
    """A run ready to start. The fixed parts of a run; `TrainerState` holds its position.

    micro_rows: rows of one forward pass on one rank; for "auto", all the rank's until the trainer has decided.
    """

    config: RunConfig
    micro_rows: int
    device: torch.device
    model: nn.Module
    partition: Partition
    growth: IdentityLayers | None  # where layers begin as the identity
    optimizer: BlockOptimizer
    data: TrainingData
    facts: DataFacts  # of the data, for checkpoints
    rows: RowPlan
    schedule: Schedule
    rule: VisitRule
    geometry: BatchGeometry
    tokenizer: Tokenizer | None
    ranks: Ranks

    @property
    def rank_rows(self) -> int:
        """How many of a step's rows one process computes."""
        return self.config.batch.rows // self.ranks.size

    @property
    def evaluation_rows(self) -> int:
        """How many validation rows are scored at a time."""
        return self.config.evaluation.batch_rows or self.micro_rows

    @property
    def trained(self) -> list[Block]:
        """What a visit to each block trains, by the block's index."""
        return self.schedule.trained(self.partition)

    def updated_weights(self, block: Block) -> set[str]:
        """Names of the weights that are updated in a visit to `block`: its own, and those of a tail that learns."""
        return {*block.parameters, *self.optimizer.tail_of(block)}

    @property
    def total_steps(self) -> int | None:
        """The most steps the run can take; None where nothing but a loss or the clock ends it."""
        limits = []
        if self.config.stop.duration is not None:
            limits.append(self.config.stop.duration.in_steps(self.geometry))
        scheduled = self.schedule.max_steps(self.partition, self.geometry)
        return min([*limits, scheduled] if scheduled is not None else limits, default=None)

    @property
    def visited_blocks(self) -> list[int]:
        """Indices of the blocks that the first sweep visits, in ascending order."""
        sweep = itertools.takewhile(lambda visit: visit.sweep == 0, self.schedule.visits(self.partition))
        return sorted({visit.block.index for visit in sweep})


def build(config: RunConfig, folder: Path, ranks: Ranks | None = None) -> TrainingContext:
    """Open the data, build the model and its partition. `folder` is the run's, for moments kept on disk; `ranks` are
    the processes of the run, None for this one alone."""
    ranks = ranks or Ranks()
    # Whole, the model may not fit on the device: the optimizer moves it weight by weight, and shards go there layer by
    # layer when they are cut.
    device = torch.device("cpu") if is_sharded(config, ranks) else pick_device(config.device)
    data = config.data_kind.open(config.data, seed=config.seed)
    seed_everything(config.seed)
    facts = DataFacts.of(data, config.data)
    choose_kernels(config.memory.kernels, device)
    has_masters = preset(config.precision).has_master and not is_sharded(config, ranks)
    model = load_model_for(config.model, facts, keep_16_bits=has_masters)
    batch = data.train.batch([0])
    parts = partition_by_config(model, config.blocks, batch=batch)
    growth = IdentityLayers(parts.chain, batch) if config.model.zero_residuals else None
    schedule = config.schedule.build(seed=config.seed)
    next(schedule.visits(parts))  # a list of blocks and the span are checked against the partition now
    rows = config.batch.rows
    if rows > len(data.train):
        raise DataError(f"batch.rows = {rows}, but there are only {len(data.train)} training rows; use fewer")
    order = ShuffledRows(len(data.train), seed=config.seed)
    plan = RowPlan(order, config.sampling, rows_per_step=rows, rank=ranks.rank, ranks=ranks.size)
    micro_rows, rank_rows = config.batch.micro_rows, rows // ranks.size
    optimizer = optimizer_of(config, parts, folder, ranks, device=device)
    require_separate_conversations(model, data)
    if config.memory.loss_chunk is not None:
        with evaluating(model):
            check_chunked(model, to_device(batch, device))
    context = TrainingContext(
        config=config,
        micro_rows=min(micro_rows, rank_rows) if isinstance(micro_rows, int) else rank_rows,
        device=device,
        model=model,
        partition=parts,
        growth=growth,
        optimizer=optimizer,
        data=data,
        facts=facts,
        rows=plan,
        schedule=schedule,
        rule=config.schedule.plateau or FullLength(),
        geometry=BatchGeometry(
            tokens_per_step=rows * data.units_per_row, rows_per_step=rows, rows_per_epoch=plan.subset_rows
        ),
        tokenizer=data.tokenizer,
        ranks=ranks,
    )
    _require_layout(context)
    # A shape that needs the run's length says so now, not after the first visit.
    config.learning_rate.factor(0, total=context.total_steps, visit_step=0)
    return context


def load_model_for(config: ModelConfig, facts: DataFacts, *, keep_16_bits: bool = False) -> nn.Module:
    """The model that `config` names, for data of which these are the facts. See `load_model`."""
    return load_model(
        config,
        vocab_size=facts.vocab_size,
        row_tokens=facts.row_tokens,
        classes=facts.classes,
        pad_token=facts.pad_token,
        keep_16_bits=keep_16_bits,
    )


def is_pipeline(config: RunConfig, ranks: Ranks) -> bool:
    """Whether the processes are a pipeline."""
    return config.distributed.layout == "pipeline" and ranks.size > 1


def is_sharded(config: RunConfig, ranks: Ranks) -> bool:
    """Whether each process holds a shard of every weight."""
    return config.distributed.layout == "fsdp" and ranks.size > 1


def pipeline_config(config: RunConfig) -> PipelineConfig:
    """A pipeline begins at the boundary wherever a prefix may be stored: then what each process trains does not depend
    on whether it is."""
    start = "inputs" if config.prefix.store == "off" else "boundary"
    return PipelineConfig(schedule=config.distributed.pipeline, start=start)


def _require_layout(context: TrainingContext) -> None:
    """Raise `ConfigError` where the processes cannot share this context as the configuration says."""
    config = context.config
    apart = config.distributed.sync_every or 1
    for name, every in (("checkpoint", config.checkpoint.every), ("evaluation", config.evaluation.every)):
        steps = every.in_steps(context.geometry)
        if steps % apart:  # between two averages of local SGD each rank has weights of its own
            raise ConfigError(
                f"{name}.every is {steps} steps, which is not a multiple of distributed.sync_every = {apart}"
            )
    if is_sharded(config, context.ranks):
        require_shardable(context.partition)
    if is_pipeline(config, context.ranks):
        rows, size = config.batch.rows, context.ranks.size
        if context.rank_rows % context.micro_rows:
            raise ConfigError(
                f"batch.micro_rows = {context.micro_rows} must divide the {context.rank_rows} rows of a step that each "
                f"of {size} processes brings into a pipeline (batch.rows = {rows})"
            )
        count = rows // context.micro_rows
        require_stages(context.partition, size, pipeline_config(config), micro_batches=count)


def optimizer_of(
    config: RunConfig,
    parts: Partition,
    folder: Path,
    ranks: Ranks,
    *,
    on_host: OnHost = OnHost(),  # noqa: B008 - a value
    device: torch.device | None = None,
) -> BlockOptimizer:
    """The optimizer that `config` describes, over `parts`.

    folder: the run's, for moments that are kept on disk. on_host: how frozen weights on the host are copied. device:
    where the model goes; None leaves it where it is.

    With FSDP the shards are the fp32 masters, whatever dtype they are gathered in for compute.
    """
    options = config.optimizer
    for key in ("lr", "weight_decay"):
        if key in options.options:
            raise ConfigError(f"[optimizer] set {key} in the table itself, not in options")
    cls = find_optimizer_class(options.name)
    keywords: dict[str, Any] = {"lr": options.lr, **options.options}
    if options.weight_decay is not None:
        keywords["weight_decay"] = options.weight_decay
    require_options(options.name, cls, keywords, pick_device(config.device))
    return BlockOptimizer(
        parts,
        cls,
        state=make_state_store(options.state, folder / "state" / f"rank-{ranks.rank}"),
        precision=replace(FP32 if is_sharded(config, ranks) else preset(config.precision), moments=options.moments),
        frozen=on_host if config.memory.frozen == "host" else OnDevice(),
        frozen_compute=config.memory.frozen_compute,
        undecayed=norms_and_biases if options.decay == "weights" else nothing,
        frozen_dropout=config.blocks.frozen_dropout,
        tail=None if options.tail == "none" else Tail(rule=options.tail, share=options.tail_share),
        in_backward=options.in_backward,
        device=device,
        **keywords,
    )

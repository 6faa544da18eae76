"""Block training in the Hugging Face Trainer and in TRL's trainers.

    trainer = BlockTrainer(model, args, train_dataset=rows, blocks=Blocks(count=3))

    class BlockSFTTrainer(BlockTrainerMixin, SFTTrainer): ...

Everything that `TrainingArguments` says still applies. The trainer sees one optimizer (`VisitingOptimizer`), which it
steps, schedules, saves and loads like any other. Overridden are where that optimizer is made, where the length of the
run becomes known, what happens when the trainer replaces the model's weights, and, with several processes, how
gradients are all-reduced: DistributedDataParallel would keep reducing those of the first block.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import has_length
from transformers.training_args import ParallelMode, TrainingArguments

from blocktrain.chain.block import Block, Partition
from blocktrain.chain.freezing import Flags
from blocktrain.chain.partition import partition_by_config
from blocktrain.chain.partition_config import PartitionConfig
from blocktrain.errors import ConfigError, NonFiniteError
from blocktrain.integrations.visiting import VisitingOptimizer
from blocktrain.modules.int8_linear import FrozenCompute
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.precision import BF16_EXACT, FP32, Precision
from blocktrain.optim.state_store import Drop, StateStore
from blocktrain.parallel.ranks import Ranks, open_ranks
from blocktrain.schedule import Cyclic, Order, Span
from blocktrain.units import BatchGeometry, Duration

log = logging.getLogger(__name__)

VISIT_STEPS = 100  # about how long visits last that nobody has chosen, where the run is long enough for that


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """How long a trainer's run is.

    steps: optimizer steps of the whole run.
    steps_per_epoch: optimizer steps of one pass over the training rows; None for rows without a known number.
    """

    steps: int
    steps_per_epoch: int | None


@dataclass(frozen=True, kw_only=True)
class Blocks(PartitionConfig):
    """What `TrainingArguments` does not say: how the model is cut into blocks, and how they are visited.

    count, stages, pieces, largest, patterns, layers: how the model is cut, as for `blocktrain.partition`.
    balance: "parameters" only, because "flops" are counted on a batch, which is not known here.
    visit: how long a visit lasts, in optimizer steps or epochs; None: as long as `sweeps` says.
    sweeps: instead of `visit`, how many times the run visits all blocks; its steps are divided evenly. With neither,
        there are as many whole sweeps as make visits of about 100 steps, and at least one.
    order: the order of the blocks in a sweep; "shuffled" draws it with the trainer's seed.
    span: a visit trains its "block", or the "suffix": every block above it too.
    state: where optimizer moments stay between visits.
    precision: None means `FP32` where all that is trained is in fp32, and `BF16_EXACT` where some of it is in bf16.
    frozen_compute: "int8" computes frozen linear layers in int8 (see `BlockOptimizer`); evaluations stay exact.
    frozen_dropout: let dropout act in frozen layers too.

    Raises `ConfigError` for options that do not go together.
    """

    visit: Duration | None = None
    sweeps: int | None = None
    order: Order | Sequence[int] = "ascending"
    span: Span = "block"
    state: StateStore = field(default_factory=Drop)
    precision: Precision | None = None
    frozen_compute: FrozenCompute = "exact"
    frozen_dropout: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.balance == "flops":
            raise ConfigError(
                "balance = 'flops' counts a forward pass over a batch, and Blocks has none: leave it out, or name the "
                "layers of each block with patterns"
            )
        if self.visit is not None and self.sweeps is not None:
            raise ConfigError(
                f"visit = {self.visit} and sweeps = {self.sweeps}: how long visits last follows from the number of "
                "sweeps and the run's length; give one of them"
            )
        Cyclic(visit=Duration.steps(VISIT_STEPS), sweeps=self.sweeps, order=self.order, span=self.span)  # refuses

    def schedule(self, partition: Partition, length: RunLength, *, seed: int) -> Cyclic:
        """The visits to `partition` in a run of `length`, in steps. They go on after the run's end.

        Raises `ConfigError` for more sweeps than the run has steps for, and for visits in epochs where the length of an
        epoch is not known.
        """
        if self.visit is not None:
            return self._cyclic(_in_steps(self.visit, length), seed=seed)
        # `blocks_of` also checks an order that lists blocks.
        a_sweep = len(self._cyclic(Duration.steps(VISIT_STEPS), seed=seed).blocks_of(0, len(partition)))
        sweeps = self.sweeps or max(1, round(length.steps / (VISIT_STEPS * a_sweep)))
        steps, longer = divmod(length.steps, sweeps * a_sweep)
        if not steps and self.sweeps is not None:
            raise ConfigError(
                f"sweeps = {sweeps} are {sweeps * a_sweep} visits, and the run has {length.steps} steps: train for at "
                "least as many steps as there are visits, or in fewer sweeps or blocks"
            )
        if not steps:
            return self._cyclic(Duration.steps(1), seed=seed)
        return self._cyclic(Duration.steps(steps), first_visits=(Duration.steps(steps + 1),) * longer, seed=seed)

    def _cyclic(self, visit: Duration, *, seed: int, first_visits: Sequence[Duration] = ()) -> Cyclic:
        return Cyclic(visit=visit, first_visits=first_visits, order=self.order, span=self.span, seed=seed)


def _in_steps(visit: Duration, length: RunLength) -> Duration:
    if visit.unit != "epochs":
        return visit
    if length.steps_per_epoch is None:
        raise ConfigError(f"visits of {visit}: the training rows have no length, so an epoch has none; use steps")
    epoch = BatchGeometry(tokens_per_step=1, rows_per_step=1, rows_per_epoch=length.steps_per_epoch)
    return Duration.steps(visit.in_steps(epoch))


def unvisited(schedule: Cyclic, partition: Partition, steps: int) -> list[Block]:
    """The blocks that no visit trains in the first `steps` steps; visits are in steps."""
    visited: set[int] = set()
    for visit in schedule.visits(partition):
        if steps <= 0:
            break
        visited.update(visit.block.members)
        steps -= int(visit.duration.value)
    return [block for block in partition if block.index not in visited]


class BlockTrainerMixin:
    """Makes a trainer class of transformers or TRL train in blocks: list it before that class among the bases. The
    trainer then takes one more argument, `blocks`.

    The optimizer class, its arguments, the weight decay and the learning rate schedule are those of
    `TrainingArguments`. Weight decay acts where `get_decay_parameter_names` of the trainer says, not on norms and
    biases: a single block is the trainer bit for bit, and is not `AdamW(model.parameters())`. Several processes
    (`torchrun`, `accelerate launch`) each have the whole model and all-reduce the gradients of the active block only.
    Raises `ConfigError` for what does not work in blocks: the loss scaling of fp16, several GPUs in one process, FSDP,
    DeepSpeed, an optimizer that chooses its own parameters.
    """

    args: TrainingArguments
    model: Any
    state: Any
    accelerator: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    optimizer: Any
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None

    def __init__(self, *args: Any, blocks: Blocks | None = None, **kwargs: Any):
        if not isinstance(blocks, Blocks | None):
            raise ConfigError(f"blocks = {blocks!r}: give Blocks(count={blocks!r}), or another of its options")
        self.blocks = blocks if blocks is not None else Blocks()
        self.visiting: VisitingOptimizer | None = None  # without the trainer's wrapper; None until training begins
        self._run_length: RunLength | None = None  # None until training begins
        self._found: Flags | None = None  # the model's flags before training
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in the trainer. Afterwards, also after an exception, parameters require gradients and modules are in train
        mode as before; the visit is left, and another call continues it."""
        if getattr(self, "model_init", None) is not None:  # the trainer makes a new model and a new optimizer
            self.visiting = self._found = None
        elif self.visiting is not None and self.visiting.blocks.block is None:
            self._require_unchanged_flags()
            self._found = Flags.of(self.model)
            self.visiting.resume()
        elif self.visiting is None:
            self._found = Flags.of(self.model)
        try:
            return super().train(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            if self.visiting is not None:
                self.visiting.pause()
            if self._found is not None:
                self._found.restore()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in the trainer. Raises `NonFiniteError` for a loss that is infinite or not a number, before the step; with
        several processes on each of them."""
        assert self.visiting is not None
        with self.visiting.gradient_sync() if self.accelerator.sync_gradients else nullcontext():
            loss = super().training_step(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        for rank, (value,) in enumerate(self.visiting.ranks.all_gather([loss.float().mean().item()])):
            if not math.isfinite(value):
                where = f" on rank {rank}" if self.visiting.ranks.size > 1 else ""
                raise NonFiniteError(
                    f"the loss is {value}{where} in step {self.state.global_step + 1} (counted from 1), a visit to "
                    f"{self.visiting.visit.block}: lower learning_rate, set max_grad_norm, or look at this step's rows"
                )
        return loss

    def _require_unchanged_flags(self) -> None:
        assert self._found is not None
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad != self._found.requires_grad[parameter]:
                raise ConfigError(
                    f"'{name}' has requires_grad = {parameter.requires_grad}, but not when the model was cut into "
                    "blocks; make a new BlockTrainer"
                )

    def set_initial_training_values(self, args: TrainingArguments, dataloader: DataLoader) -> Any:
        """As in the trainer; visits follow from the length of the run that it finds."""
        values = super().set_initial_training_values(args, dataloader)  # pyright: ignore[reportAttributeAccessIssue]
        steps_per_epoch = values[1] if has_length(dataloader) else None
        self._run_length = RunLength(steps=values[-1], steps_per_epoch=steps_per_epoch)
        return values

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Cut the model and make the optimizer that visits its blocks."""
        if self.optimizer is None:
            self._require_supported()
            self.visiting = self.optimizer = self._make_optimizer()
        elif self.visiting is None:
            raise ConfigError(
                "optimizers=(...): BlockTrainer makes its own optimizer; give optimizer_cls_and_kwargs=(class, {...}) "
                "instead"
            )
        # The trainer would clip the gradients of `model.parameters()`; under BF16_EXACT the masters have them.
        self.accelerator.clip_grad_norm_ = self._clip
        self.accelerator.prepare_model = self._prepare_model
        return self.optimizer

    def _make_optimizer(self) -> VisitingOptimizer:
        cls, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)  # pyright: ignore[reportAttributeAccessIssue]
        own = {"params", "model", "optimizer_dict"} & options.keys()
        if own or not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise ConfigError(
                f"optim = '{self.args.optim}' chooses its own parameters, so it cannot be given those of one block; "
                "use one that takes any parameters, such as 'adamw_torch'"
            )
        if "weight_decay" in inspect.signature(cls).parameters:
            options = {"weight_decay": self.args.weight_decay, **options}
        settings = self.blocks
        ranks = Ranks()
        if self.args.parallel_mode == ParallelMode.DISTRIBUTED:
            with open_ranks(timeout_seconds=self.args.ddp_timeout) as ranks:  # those of the trainer's process group
                ranks.broadcast(tensor.data for tensor in (*self.model.parameters(), *self.model.buffers()))
        partition = partition_by_config(self.model, settings)
        if self._found is None:  # called by the user before training begins, or the trainer made the model itself
            self._found = Flags.of(self.model)
        names = set(self.get_decay_parameter_names(self.model))  # pyright: ignore[reportAttributeAccessIssue]
        decayed = {id(parameter) for name, parameter in self.model.named_parameters() if name in names}
        trained = partition.whole.parameters.values()
        if options.get("weight_decay"):
            log.info(
                "weight_decay = %g acts on %d of %d trained tensors: as in the trainer, get_decay_parameter_names "
                "leaves out norms and biases unless you override it",
                options["weight_decay"],
                sum(id(parameter) in decayed for parameter in trained),
                len(trained),
            )
        is_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in trained)
        blocks = BlockOptimizer(
            partition,
            cls,
            state=settings.state,
            precision=settings.precision or (BF16_EXACT if is_bf16 else FP32),
            frozen_compute=settings.frozen_compute,
            undecayed=lambda module, attribute: id(getattr(module, attribute)) not in decayed,
            frozen_dropout=settings.frozen_dropout,
            **options,
        )
        if self._run_length is None:  # called by the user, before training begins
            self.set_initial_training_values(self.args, self.get_train_dataloader())  # pyright: ignore[reportAttributeAccessIssue]
        assert self._run_length is not None
        schedule = settings.schedule(blocks.partition, self._run_length, seed=self.args.seed)
        visiting = VisitingOptimizer(blocks, schedule, ranks=ranks)
        missed = unvisited(schedule, blocks.partition, self._run_length.steps)
        if missed:
            log.warning(
                "%d of %d blocks are never visited in this run of %d steps: %s. %s",
                len(missed),
                len(blocks.partition),
                self._run_length.steps,
                "; ".join(map(repr, missed)),
                self._way_to_visit_all(missed),
            )
        return visiting

    def _way_to_visit_all(self, missed: Sequence[Block]) -> str:
        order, visit = self.blocks.order, self.blocks.visit
        if not isinstance(order, str) and any(block.index not in order for block in missed):
            return f"Name them in Blocks(order={list(order)}) too"
        if visit is None:
            return "Train for more steps or in fewer blocks"
        return f"Leave out Blocks(visit={visit}), so that visits follow from the run's length, or give Blocks(sweeps=1)"

    def _require_supported(self) -> None:
        if self.args.fp16:
            raise ConfigError("fp16 = True scales the loss, and masters would get scaled gradients; use bf16 = True")
        if self._quantizes and self.args.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end = True copies weights into a model whose frozen weights are quantized: leave "
                "it out and load the best checkpoint's folder with from_pretrained, or use Blocks(precision=BF16_EXACT)"
            )
        if self.args.parallel_mode not in (ParallelMode.NOT_PARALLEL, ParallelMode.DISTRIBUTED):
            raise ConfigError(
                f"{self.args.n_gpu} GPUs in one process would run copies of the model that blocktrain does not know: "
                "start one process for each GPU with torchrun or accelerate launch, or show this one a single GPU "
                "(CUDA_VISIBLE_DEVICES=0)"
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            name = "FSDP" if self.is_fsdp_enabled else "DeepSpeed"
            raise ConfigError(
                f"{name} divides weights among processes and does not follow from block to block: leave it out (each "
                "process then has the whole model), or use blocktrain train with distributed.layout = 'fsdp'"
            )

    @property
    def _quantizes(self) -> bool:
        """Whether frozen weights are kept in 8 or 4 bits, so that no weights can be copied into them."""
        return self.blocks.precision is not None and self.blocks.precision.is_quantized

    def _clip(self, parameters: object, max_norm: float, norm_type: float = 2) -> Tensor:
        assert self.visiting is not None
        return self.visiting.clip_grad_norm(max_norm)

    def _prepare_model(self, model: nn.Module, **options: Any) -> nn.Module:
        """Accelerate's, which does not wrap a model for evaluation in DistributedDataParallel. Ours is on its device
        already, and weights that are stored elsewhere cannot be moved."""
        ours = {"device_placement": False, "evaluation_mode": True} if model is self.model else {}
        return type(self.accelerator).prepare_model(self.accelerator, model, **{**options, **ours})

    def _load_best_model(self) -> None:
        """As in the trainer; then masters restart from the weights that it loaded."""
        super()._load_best_model()  # pyright: ignore[reportAttributeAccessIssue]
        if self.visiting is not None:
            self.visiting.restart_masters()

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As in the trainer; then masters restart from the weights that it loaded, until the checkpoint's optimizer
        state, if there is one, restores them exactly."""
        if self.visiting is not None and self._quantizes:
            raise ConfigError("frozen weights are quantized already: resume with a new trainer and a new model")
        super()._load_from_checkpoint(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if self.visiting is not None:
            self.visiting.restart_masters()


class BlockTrainer(BlockTrainerMixin, Trainer):
    """`transformers.Trainer` in blocks: it takes the same arguments, and `blocks`."""

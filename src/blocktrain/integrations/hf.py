"""The Hugging Face Trainer, and TRL's trainers, in blocks.

    trainer = BlockTrainer(model, args, train_dataset=rows, blocks=Blocks(count=3, visit=Duration.steps(100)))

    class BlockSFTTrainer(BlockTrainerMixin, SFTTrainer): ...

Everything that `TrainingArguments` says still holds. The trainer sees one optimizer (`VisitingOptimizer`), which it
steps, schedules, saves and loads as any other; all that is overridden is where that optimizer is made, and what has to
happen when the trainer replaces the model's weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.training_args import ParallelMode

from blocktrain.chain.block import Partition
from blocktrain.chain.partition import Pieces, partition
from blocktrain.errors import ConfigError
from blocktrain.integrations.visiting import VisitingOptimizer
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.precision import BF16_EXACT, FP32, Precision
from blocktrain.optim.state import Drop, StateStore
from blocktrain.schedule import Cyclic, Order, Span
from blocktrain.units import Duration


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """What `TrainingArguments` does not say.

    count, pieces, largest, patterns: how the model is cut (see `blocktrain.partition`); the last one given holds.
    visit: in optimizer steps. order: of the blocks in a sweep; "shuffled" by the trainer's seed. span: a visit trains
    its "block" or the "suffix" that begins with it. state: moments between visits. precision: None is `FP32` for a
    model in fp32 and `BF16_EXACT` for one in bf16. frozen_dropout: let dropout act in frozen layers.
    """

    count: int = 3
    pieces: Pieces = "layers"
    largest: int | None = None
    patterns: Sequence[Sequence[str]] | None = None
    visit: Duration = Duration.steps(100)
    order: Order | Sequence[int] = "ascending"
    span: Span = "block"
    state: StateStore = field(default_factory=Drop)
    precision: Precision | None = None
    frozen_dropout: bool = False

    def cut(self, model: nn.Module) -> Partition:
        """The partition of `model`."""
        if self.patterns is not None:
            return partition(model, patterns=self.patterns)
        if self.largest:
            return partition(model, largest=self.largest)
        return partition(model, self.count, pieces=self.pieces)


class BlockTrainerMixin:
    """Put it before a trainer class of transformers or TRL; the new argument is `blocks`.

    The optimizer class, its arguments, weight decay and the schedule of the learning rate are those of
    `TrainingArguments`. Raises `ConfigError` for what does not work in blocks: fp16's loss scaling, several processes
    or GPUs, an optimizer that chooses its own parameters.
    """

    args: Any
    model: Any
    accelerator: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any

    def __init__(self, *args: Any, blocks: Blocks | None = None, **kwargs: Any):
        if not isinstance(blocks, Blocks | None):
            raise ConfigError(f"blocks = {blocks!r}: give Blocks(count={blocks!r}), or what else it takes")
        self.blocks = blocks if blocks is not None else Blocks()
        self._visiting: VisitingOptimizer | None = None
        super().__init__(*args, **kwargs)

    @property
    def visiting(self) -> VisitingOptimizer | None:
        """The optimizer under the trainer's wrapping, once training has begun."""
        return self._visiting

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Cut the model and make the optimizer that visits its blocks."""
        if self.optimizer is None:
            self._refuse_what_does_not_work()
            self._visiting = self.optimizer = self._make_optimizer()
        elif self._visiting is None:
            raise ConfigError(
                "optimizers=(...): BlockTrainer makes its own; give optimizer_cls_and_kwargs=(class, {...})"
            )
        # The trainer clips what `model.parameters()` hold; under BF16_EXACT the gradients are the masters'.
        self.accelerator.clip_grad_norm_ = self._clip
        return self.optimizer

    def _make_optimizer(self) -> VisitingOptimizer:
        cls, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)  # pyright: ignore[reportAttributeAccessIssue]
        own = {"params", "model", "optimizer_dict"} & options.keys()
        if own or not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise ConfigError(
                f"optim = '{self.args.optim}' chooses its own parameters, so it cannot be given those of one block; "
                "use one that takes any, such as 'adamw_torch'"
            )
        if "weight_decay" in inspect.signature(cls).parameters:
            options = {"weight_decay": self.args.weight_decay, **options}
        settings = self.blocks
        blocks = BlockOptimizer(
            settings.cut(self.model),
            cls,
            state=settings.state,
            precision=settings.precision or _precision_of(self.model),
            frozen_dropout=settings.frozen_dropout,
            **options,
        )
        schedule = Cyclic(visit=settings.visit, order=settings.order, span=settings.span, seed=self.args.seed)
        return VisitingOptimizer(blocks, schedule)

    def _refuse_what_does_not_work(self) -> None:
        if self.args.fp16:
            raise ConfigError("fp16 = True scales the loss, which masters do not know of; use bf16 = True")
        if self._packs and self.args.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end = True copies weights into a model whose frozen ones are packed: leave it out "
                "and load the best checkpoint's folder with from_pretrained, or use Blocks(precision=BF16_EXACT)"
            )
        if self.args.parallel_mode != ParallelMode.NOT_PARALLEL:
            raise ConfigError(
                f"{self.args.parallel_mode.value}: several processes or GPUs would go on exchanging gradients of "
                "the first block alone; run one process and show it one GPU (CUDA_VISIBLE_DEVICES=0)"
            )

    @property
    def _packs(self) -> bool:
        """Whether frozen weights are kept in 8 or 4 bits, so that nothing can be copied into them."""
        return self.blocks.precision is not None and self.blocks.precision.is_quantized

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        assert self._visiting is not None
        return self._visiting.clip_grad_norm(max_norm)

    def _load_best_model(self) -> None:
        """The trainer's own; masters then start anew from the weights it loaded."""
        super()._load_best_model()  # pyright: ignore[reportAttributeAccessIssue]
        if self._visiting is not None:
            self._visiting.take_weights()

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """The trainer's own; masters then start anew, unless the checkpoint's optimizer says better."""
        if self._visiting is not None and self._packs:
            raise ConfigError("frozen weights are packed already: resume with a new trainer and a new model")
        super()._load_from_checkpoint(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if self._visiting is not None:
            self._visiting.take_weights()


class BlockTrainer(BlockTrainerMixin, Trainer):
    """`transformers.Trainer` in blocks: the same arguments, and `blocks`."""


def _precision_of(model: nn.Module) -> Precision:
    bf16 = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    return BF16_EXACT if bf16 else FP32

"""The train module of block coordinate descent: a `BlockOptimizer`, its ranks, and how rows pass through the model.

layout                 parallel                    passes
data                   DataParallel or LocalSGD    RankPasses: this rank's rows through the whole model
fsdp                   ShardedDataParallel                   RankPasses, whose weights are gathered layer by layer
pipeline               Pipeline                    PipelinePasses: all rows through this rank's layers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from blocktrain.data.sampling import StepRows
from blocktrain.parallel.protocol import Parallel
from blocktrain.schedule import Visit
from blocktrain.train.checkpoint import CheckpointSource
from blocktrain.train.context import TrainingContext
from blocktrain.train.forward_backward import Passes


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

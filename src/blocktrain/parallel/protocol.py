"""What the ways of training on several ranks have in common, and what they need of the block that is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from blocktrain.chain.block import Block
from blocktrain.parallel.config import DistributedConfig
from blocktrain.parallel.ranks import Ranks


class TrainedBlock(Protocol):
    """The active block with its gradients and its optimizer's state, as a `BlockOptimizer` has them in a visit."""

    block: Block
    trained: Mapping[str, nn.Parameter]  # by name, what the optimizer updates: the block's weights, or their masters

    def gradient(self, name: str) -> Tensor | None:
        """The gradient accumulated for a parameter (not a copy); None where there is none."""
        ...

    def put_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Replace a parameter's gradient; None removes it."""
        ...

    def entries(self) -> Mapping[str, dict[str, Any]]:
        """The optimizer's state of each parameter by name (not a copy)."""
        ...

    def write_weights(self) -> None:
        """Copy `trained` into the model."""
        ...

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale this rank's gradients to a total 2-norm of at most `max_norm`; returns the norm before (0-d)."""
        ...


class Parallel(ABC):
    """How ranks train one block together. A single process uses the same code."""

    in_sync = True  # whether all ranks have the weights of the last step, or can have them by `sync_weights`

    @abstractmethod
    def visit(self, active: TrainedBlock) -> AbstractContextManager[None]:
        """Wraps the steps of a visit. At its end all ranks have equal weights; raises `PeerError` if they do not."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float) -> Tensor | float:
        """Scale the step's gradients to a total 2-norm of at most `max_norm`; returns the norm before (0-d)."""

    def local_block(self, block: Block) -> Block:
        """The part of `block` that this rank trains: all of it, unless the layers are distributed (pipeline)."""
        return block

    def after_step(self, step: int) -> None:  # noqa: B027 - not abstract: doing nothing is the default
        """To be called after the optimizer has taken the 0-based `step` of the run. By default all ranks have taken the
        same step, and there is nothing to do."""

    def sync_weights(self) -> None:  # noqa: B027
        """Give all ranks the current weights, in the middle of a visit. Collective. By default they have them."""


class BatchParallel(Parallel):
    """A `Parallel` whose ranks each run the whole model on their own rows of the batch, and train the same block."""

    def __init__(self, ranks: Ranks, config: DistributedConfig):
        self.ranks = ranks
        self.config = config
        self._active: TrainedBlock | None = None

    @abstractmethod
    def gradient_sync(self) -> AbstractContextManager[None]:
        """Wraps the last backward pass of a step. Afterwards the gradients are those to step with."""

    def clip_grad_norm(self, max_norm: float) -> Tensor | float:
        """See `Parallel`; every rank has the whole gradients."""
        return self._in_visit().clip_grad_norm(max_norm)

    def _in_visit(self) -> TrainedBlock:
        assert self._active is not None, "steps are taken inside a visit"
        return self._active

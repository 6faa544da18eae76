"""A train module implements the parts of one optimizer step; the trainer runs the loop around it.

    trainer                                    module
    for visit in schedule:
        with module.visit(visit):              which weights learn; hooks, masters, moments
            take_step(module, ...):            step.py, the same for every module
                module.begin_step(...)         learning rate
                module.forward_backward(...)   the gradients of the step's rows
                module.clip_grad_norm(...)
                module.update(...)             or discard, after a non-finite step

There are two: `BlocksModule`, for every layout, and in `compare/` `ExternalModule`, for another package's method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from blocktrain.data.sampling import StepRows
from blocktrain.records.run_records import Opening, RunHeader
from blocktrain.schedule import Visit
from blocktrain.train.checkpoint import CheckpointSource
from blocktrain.train.context import TrainingContext
from blocktrain.train.technique import Techniques


class TrainModule(Protocol):
    """How one optimizer step is taken. Every rank makes the same calls in the same order."""

    model: nn.Module  # what is evaluated

    @property
    def is_settled(self) -> bool:
        """Whether every rank has the same weights at this moment, so that a checkpoint can be taken."""
        ...

    @property
    def checkpoint_source(self) -> Callable[[], CheckpointSource] | None:
        """Makes what a checkpoint is written from (a collective call); None where nothing can be saved."""
        ...

    @property
    def forward_backward(self) -> Callable[[StepRows, StepRows], list[Tensor | float]]:
        """(rows, following) -> this rank's shares of the step's mean loss (0-d), whose gradients are in the weights.
        The shares of all ranks add up to the loss. `following` are the next step's rows, which may be prefetched."""
        ...

    def visit(self, visit: Visit, following: Visit | None) -> AbstractContextManager[None]:
        """Around the steps of a visit. `following` is the visit after it, whose optimizer state may be prefetched."""
        ...

    def begin_step(self, step: int, lr_factor: float) -> None:
        """Before the forward pass of 0-based `step`: learn at `lr_factor` times the configured rate."""
        ...

    def clip_grad_norm(self, max_norm: float) -> Tensor | float | None:
        """Scale the gradients to a total 2-norm of at most `max_norm`; returns the norm before (0-d), or None where the
        backward pass has used the gradients up."""
        ...

    def update(self, step: int) -> None:
        """Move the weights and free the gradients."""
        ...

    def discard(self, step: int) -> None:
        """Free the gradients of a step that is skipped."""
        ...

    def trained_buffers(self) -> Iterator[Tensor]:
        """Buffers that a forward pass of this visit changes, such as BatchNorm's statistics."""
        ...

    def settle(self) -> None:
        """Give every rank the weights as they are now, for an evaluation. Collective."""
        ...

    def state_bytes(self) -> int:
        """Bytes of the optimizer state that this rank holds for the active block."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that can take its first step. `context` is the one that the module works on: with sharded weights, say."""

    context: TrainingContext
    module: TrainModule
    techniques: Techniques


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a method of training is made of: three functions, which the trainer calls in this order.

    header: (context, name of the method) -> what is trained, and how. A checkpoint of a run with another header was
        written before the run was moved.
    opening: (context, header, micro_rows) -> what a step costs; rank 0 alone. `micro_rows` was decided when the run
        began; None: decide now, where the configuration leaves it open.
    prepare: (context, opening, the run's folder) -> the module, after a checkpoint was loaded into the context.
        Collective.
    """

    header: Callable[[TrainingContext, str], RunHeader]
    opening: Callable[[TrainingContext, RunHeader, int | None], Opening]
    prepare: Callable[[TrainingContext, Opening, Path], Prepared]

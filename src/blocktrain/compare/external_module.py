"""The train module of another package's method: our trainer, data, evaluation and records around its optimizer.

    for step in ...:
        begin(step)                       the method chooses what is trained now
        backward(loss, lr_factor)         gradients; LOMO updates here
        update                            the optimizers' steps

A method is a function that returns an `ExternalMethod` (see `Adapter`). Nothing is checkpointed: most packages cannot
save what they hold, so a run that was interrupted begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.data.sampling import StepRows
from blocktrain.schedule import Visit
from blocktrain.train.context import TrainingContext
from blocktrain.train.forward_backward import micro_batches
from blocktrain.train.technique import Techniques


@dataclass(frozen=True, kw_only=True, eq=False)
class ExternalMethod:
    """A model, and what another package trains it with.

    optimizers: those whose learning rates follow the schedule, and that step after the backward pass.
    begin: called with the number of each step (from 0) before it.
    backward: called with the loss and the schedule's factor of the learning rate.
    masters: the high-precision copies of weights, where there are some.
    state: what the optimizers keep; None is `optimizer.state` of each.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    begin: Callable[[int], None] = field(default=lambda step: None)
    backward: Callable[[Tensor, float], None] = field(default=lambda loss, lr_factor: loss.backward())
    masters: Callable[[], Iterable[Tensor]] = field(default=tuple)
    state: Callable[[], Any] | None = None

    def memory_parts(self) -> dict[str, list[Tensor]]:
        """The tensors that exist beside the model's weights now, by part of memory."""
        kept = [optimizer.state for optimizer in self.optimizers] if self.state is None else self.state()
        return {
            "master": list(self.masters()),
            "gradients": [p.grad for p in self.model.parameters() if p.grad is not None],
            "moments": list(tensors_in(kept)),
        }

    def state_bytes(self) -> int:
        """Bytes that the optimizers keep now, projections included."""
        return sum(tensor.nbytes for tensor in self.memory_parts()["moments"])


class ExternalModule:
    """Steps of an `ExternalMethod`, on the rows and with the random numbers of full training. See `TrainModule`."""

    is_settled = True
    checkpoint_source = None

    def __init__(
        self, context: TrainingContext, method: ExternalMethod, techniques: Techniques, *, known_state_bytes: int = 0
    ):
        """known_state_bytes: the most optimizer state that was measured before, in a method that drops some of it."""
        self.context = context
        self.method = method
        self.model = method.model
        self._techniques = techniques
        self._lr_factor = 1.0
        self._most_state_bytes = known_state_bytes

    def visit(self, visit: Visit, following: Visit | None) -> AbstractContextManager[None]:
        """The whole run is one visit; what the method switches in it is its own affair."""
        return nullcontext()

    def begin_step(self, step: int, lr_factor: float) -> None:
        """See `TrainModule`."""
        self._lr_factor = lr_factor
        self.method.begin(step)

    def forward_backward(self, rows: StepRows, following: StepRows) -> list[Tensor | float]:
        """See `TrainModule`."""
        losses: list[Tensor | float] = []
        for part, batch, weight in micro_batches(self.context, rows.split(self.context.micro_rows), rows):
            with self._techniques.around_batch(part, batch):
                share = self.model(**batch).loss * weight
                self.method.backward(share, self._lr_factor)
            losses.append(share.item())  # kept on the device it would count as an activation
        return losses

    def clip_grad_norm(self, max_norm: float) -> Tensor | float | None:
        """See `TrainModule`."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients:
            return None
        norm = torch.nn.utils.get_total_norm(gradients)
        if max_norm != float("inf"):
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        return norm

    def update(self, step: int) -> None:
        """See `TrainModule`."""
        for optimizer in self.method.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * self._lr_factor
            optimizer.step()
        self.discard(step)

    def discard(self, step: int) -> None:
        """See `TrainModule`."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def trained_buffers(self) -> Iterator[Tensor]:
        """See `TrainModule`."""
        return self.model.buffers()

    def settle(self) -> None:
        """There is one process."""

    def state_bytes(self) -> int:
        """The most that the optimizers are known to have kept: now, when this was called before, or when measured."""
        self._most_state_bytes = max(self._most_state_bytes, self.method.state_bytes())
        return self._most_state_bytes


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in dictionaries, lists and plain objects; keys, which may be parameters, are left out."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value))

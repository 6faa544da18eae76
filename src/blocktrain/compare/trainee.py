"""What trains under a method of somebody else's: a model, what moves it, and when.

    for step in ...:
        trainee.begin(step)                  choose what is trained now
        trainee.backward(loss, factor)       gradients; LOMO updates here
        trainee.update(factor)               the optimizers' steps, gradients gone

Each method is a function that returns one of these (`peers.py`, `lisa.py`); everything else (data, order, evaluation,
records) is shared and lies in `session.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Held = dict[str, list[Tensor]]  # part of memory -> its tensors


def plain_backward(loss: Tensor, factor: float) -> None:
    """The ordinary backward pass."""
    loss.backward()


@dataclass(frozen=True, kw_only=True, eq=False)
class Trainee:
    """A model and what trains it.

    optimizers: whose learning rates follow the schedule, and that step after the backward pass.
    begin: called with the number of each step (from 0) before it. backward: with the loss and the schedule's factor of
    the learning rate. masters: of high precision, where there are some. state: what the optimizers keep.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    begin: Callable[[int], None] = field(default=lambda step: None)
    backward: Callable[[Tensor, float], None] = plain_backward
    masters: Callable[[], Iterable[Tensor]] = field(default=tuple)
    state: Callable[[], Any] | None = None

    def clip(self, max_norm: float) -> float:
        """Scale the gradients to a total 2-norm of at most `max_norm`; returns the norm before, nan where the backward
        pass has used them up."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients:
            return float("nan")
        norm = torch.nn.utils.get_total_norm(gradients)
        if max_norm != float("inf"):
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        return float(norm)

    def update(self, factor: float) -> None:
        """Step at `factor` times the learning rate."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
            optimizer.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Free them."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def held(self) -> Held:
        """What lies beside the model's weights now, by part of memory."""
        kept = [optimizer.state for optimizer in self.optimizers] if self.state is None else self.state()
        return {
            "master": list(self.masters()),
            "gradients": [p.grad for p in self.model.parameters() if p.grad is not None],
            "moments": list(tensors_in(kept)),
        }

    def state_bytes(self) -> int:
        """Bytes of what the optimizers keep now, projections included."""
        return sum(tensor.nbytes for tensor in self.held()["moments"])


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

"""The active block's high-precision copy, for models whose weights are kept in less than fp32.

activate   master = join(bf16 weight, remainder)            exact
backward   the first micro-batch's gradient is kept as it is; from the second on they add up in fp32
step       for each weight: its gradient in fp32, the optimizer moves the master, weight = bf16 half of it
retire     weight, remainder = split(master);  the master is gone
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from blocktrain.optim.precision import half, join, split

Remainders = dict[str, Tensor]  # int16, on the host


class Masters:
    """fp32 masters of one block's bf16 `weights`, alive during a visit.

    remainders: what the weights leave out of their masters; of those that are not named, nothing. Memory: 4 bytes a
    parameter, and gradients: 2 bytes with one micro-batch a step (in fp32 one weight at a time), 4 with several.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], remainders: Remainders):
        self.weights = weights
        self.parameters = {name: nn.Parameter(_master(weight, remainders.get(name))) for name, weight in weights.items()}
        self._gradients: dict[str, Tensor] = {}  # bf16: of one micro-batch. fp32: the sum of several
        self._factor: Tensor | None = None  # of all gradients, to be applied when they are widened
        self._hooks: list[RemovableHandle] = [
            weight.register_post_accumulate_grad_hook(self._collector(name)) for name, weight in weights.items()
        ]

    def _collector(self, name: str):
        """Takes each micro-batch's gradient; sums in bf16 would lose the small ones."""

        def collect(weight: Tensor) -> None:
            if weight.grad is None:
                return
            if self._factor is not None:
                self.gradients()
            before = self._gradients.get(name)
            self._gradients[name] = weight.grad if before is None else before.to(torch.float32).add_(weight.grad)
            weight.grad = None

        return collect

    def gradients(self) -> dict[str, Tensor]:
        """All gradients there are, in fp32."""
        for name in self._gradients:
            self._gradients[name] = self._widened(name)
        self._factor = None
        return self._gradients

    def _widened(self, name: str) -> Tensor:
        gradient = self._gradients[name].to(torch.float32)
        return gradient if self._factor is None else gradient.mul_(self._factor)

    def norm(self) -> Tensor:
        """Total 2-norm of the gradients in fp32, without a copy of them (0-d)."""
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in self._gradients.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        return norm if self._factor is None else norm * self._factor

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by `factor` (0-d)."""
        self._factor = factor if self._factor is None else self._factor * factor

    def forget_gradients(self) -> None:
        """Free them."""
        self._gradients.clear()
        self._factor = None
        for weight in self.weights.values():
            weight.grad = None

    @contextmanager
    def stepping(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, the masters of `names` have their gradients in fp32. Afterwards these are used up, and the model's
        weights are the bf16 halves of their masters."""
        moving = [name for name in names if name in self._gradients]
        for name in moving:
            self.parameters[name].grad = self._widened(name)
            del self._gradients[name]
        yield
        with torch.no_grad():
            for name in moving:
                self.parameters[name].grad = None
                self.weights[name].copy_(half(self.parameters[name].data))

    def stepped(self) -> None:
        """All gradients are used up."""
        self._factor = None

    def remainders(self) -> Remainders:
        """What the weights leave out of the masters now."""
        return {name: split(master.data)[1].cpu() for name, master in self.parameters.items()}

    def close(self) -> None:
        """Retire: stop collecting gradients. The weights are those of the last step."""
        for hook in self._hooks:
            hook.remove()
        self.forget_gradients()


def _master(weight: nn.Parameter, remainder: Tensor | None) -> Tensor:
    return weight.data.float() if remainder is None else join(weight.data, remainder.to(weight.device))


@torch.no_grad()
def lower(parameters: Mapping[str, nn.Parameter]) -> Remainders:
    """Store `parameters` in bf16 in place; what that leaves out is returned."""
    remainders = {}
    for name, parameter in parameters.items():
        if parameter.dtype == torch.bfloat16:
            remainders[name] = torch.zeros(parameter.shape, dtype=torch.int16)
        else:
            parameter.data, remainder = split(parameter.data.float())
            remainders[name] = remainder.cpu()
    return remainders

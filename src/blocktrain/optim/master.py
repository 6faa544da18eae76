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

from blocktrain.chain.block import Block
from blocktrain.optim.precision import half, join, split

LowBits = dict[str, Tensor]  # int16, on the host


class Masters:
    """What the optimizers move in place of a block's weights, alive during a visit.

    bf16 weights: fp32 masters. fp32 weights of which the block owns some rows only: views of those rows. low_bits:
    what the weights leave out of their masters; of those that are not named, nothing.

    Memory of a bf16 parameter: 4 bytes, and for its gradient 2 bytes with one micro-batch a step (in fp32 for one
    weight at a time), 4 with several. Autograd makes the gradient of all rows; the block's are kept.
    """

    def __init__(self, block: Block, low_bits: LowBits):
        self.block = block
        self.parameters = {name: nn.Parameter(self._joined(name, low_bits.get(name))) for name in block.parameters}
        self.collected: dict[str, Tensor] = {}  # in the weights' dtype: of one micro-batch; in fp32: of several
        self._factor: Tensor | None = None  # of all gradients, to be applied when they are widened
        self._hooks: list[RemovableHandle] = [
            weight.register_post_accumulate_grad_hook(self._collector(name))
            for name, weight in block.parameters.items()
        ]

    def _joined(self, name: str, remainder: Tensor | None) -> Tensor:
        part = self.block.part(name, self.block.parameters[name].data)
        return part.float() if remainder is None else join(part, remainder.to(part.device))

    def _collector(self, name: str):
        """Takes each micro-batch's gradient; sums in bf16 would lose the small ones."""
        whole = name not in self.block.rows

        def collect(weight: Tensor) -> None:
            if weight.grad is None:
                return
            if self._factor is not None:
                self.gradients()
            gradient, before = self.block.part(name, weight.grad), self.collected.get(name)
            if before is None:
                self.collected[name] = gradient if whole else gradient.clone()
            else:
                self.collected[name] = before.to(torch.float32).add_(gradient)
            weight.grad = None

        return collect

    def gradients(self) -> dict[str, Tensor]:
        """All gradients there are, in fp32."""
        for name in self.collected:
            self.collected[name] = self._widened(name)
        self._factor = None
        return self.collected

    def _widened(self, name: str) -> Tensor:
        gradient = self.collected[name].to(torch.float32)
        return gradient if self._factor is None else gradient.mul_(self._factor)

    def norm(self) -> Tensor:
        """Total 2-norm of the gradients in fp32, without a copy of them (0-d)."""
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in self.collected.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        return norm if self._factor is None else norm * self._factor

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by `factor` (0-d)."""
        self._factor = factor if self._factor is None else self._factor * factor

    def forget_gradients(self) -> None:
        """Free them; after a step, all that is left of them is their factor."""
        self.collected.clear()
        self._factor = None

    @contextmanager
    def stepping(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, the masters of `names` have their gradients in fp32. Afterwards these are used up, and the model's
        bf16 weights are the halves of their masters; fp32 weights are the masters' own memory."""
        moving = [name for name in names if name in self.collected]
        for name in moving:
            self.parameters[name].grad = self._widened(name)
            del self.collected[name]
        yield
        for name in moving:
            self.parameters[name].grad = None
        self.write_weights(moving)

    @torch.no_grad()
    def write_weights(self, names: Iterable[str] | None = None) -> None:
        """Give the model's bf16 weights the halves of their masters; all, or those of `names`."""
        for name in self.parameters if names is None else names:
            weight = self.block.parameters[name]
            if weight.dtype == torch.bfloat16:
                self.block.part(name, weight).copy_(half(self.parameters[name].data))

    def low_bits(self, names: Iterable[str]) -> LowBits:
        """What those of the weights called `names` that have masters leave out of them now; nothing where they are
        fp32."""
        return {
            name: split(self.parameters[name].data)[1].cpu()
            for name in names
            if name in self.parameters and self.block.parameters[name].dtype == torch.bfloat16
        }

    def close(self) -> None:
        """Retire: stop collecting gradients. The weights are those of the last step."""
        for hook in self._hooks:
            hook.remove()
        self.forget_gradients()


@torch.no_grad()
def lower(parameters: Mapping[str, nn.Parameter]) -> LowBits:
    """Store `parameters` in bf16 in place; what that leaves out is returned."""
    low_bits = {}
    for name, parameter in parameters.items():
        if parameter.dtype == torch.bfloat16:
            low_bits[name] = torch.zeros_like(parameter, dtype=torch.int16, device="cpu")
        else:
            parameter.data, remainder = split(parameter.data.float())
            low_bits[name] = remainder.cpu()
    return low_bits

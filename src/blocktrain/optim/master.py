"""The active block's high-precision copy, for models whose weights are kept in less than fp32.

activate   master = join(bf16 weight, remainder)            exact
backward   master.grad += weight.grad in fp32;  weight.grad = None
step       the optimizer moves the master;  weight = bf16 half of it
retire     weight, remainder = split(master);  the master is gone
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from blocktrain.blocks.block import Block
from blocktrain.optim.precision import half, join, split

Remainders = dict[str, Tensor]  # int16, on the host


class Masters:
    """What the optimizers move in place of a block's weights, alive during a visit.

    bf16 weights: fp32 masters. fp32 weights of which the block owns some rows only: views of those rows. Memory:
    8 bytes a bf16 parameter with gradients. Autograd makes the gradient of all rows; the block's are kept.
    """

    def __init__(self, block: Block, remainders: Remainders):
        self.block = block
        self.parameters = {name: nn.Parameter(self._joined(name, remainders.get(name))) for name in block.parameters}
        self._hooks: list[RemovableHandle] = [
            weight.register_post_accumulate_grad_hook(self._collector(name))
            for name, weight in block.parameters.items()
        ]

    def _joined(self, name: str, remainder: Tensor | None) -> Tensor:
        part = self.block.part(name, self.block.parameters[name].data)
        return part if remainder is None else join(part, remainder.to(part.device))

    def _collector(self, name: str):
        """Adds each micro-batch's gradient in fp32 and frees it; sums in bf16 would lose the small ones."""
        master, whole = self.parameters[name], name not in self.block.rows

        def collect(weight: Tensor) -> None:
            if weight.grad is None:
                return
            gradient = self.block.part(name, weight.grad)
            if master.grad is None:
                master.grad = gradient.to(master.dtype, copy=not whole)
            else:
                master.grad.add_(gradient)
            weight.grad = None

        return collect

    @torch.no_grad()
    def write_weights(self) -> None:
        """Give the model the bf16 half of each master; fp32 weights are the masters' own memory."""
        for name, weight in self.block.parameters.items():
            if weight.dtype == torch.bfloat16:
                self.block.part(name, weight).copy_(half(self.parameters[name].data))

    def remainders(self) -> Remainders:
        """What the weights leave out of the masters now; nothing where they are fp32."""
        return {
            name: split(master.data)[1].cpu()
            for name, master in self.parameters.items()
            if self.block.parameters[name].dtype == torch.bfloat16
        }

    def close(self) -> Remainders:
        """Retire: stop collecting gradients and hand over the remainders. The weights are those of the last step."""
        for hook in self._hooks:
            hook.remove()
        return self.remainders()


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

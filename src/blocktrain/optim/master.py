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

from blocktrain.optim.precision import half, join, split

Remainders = dict[str, Tensor]  # int16, on the host


class Masters:
    """fp32 masters of one block's bf16 `weights`, alive during a visit. Memory: 8 bytes a parameter with gradients."""

    def __init__(self, weights: Mapping[str, nn.Parameter], remainders: Remainders):
        self.weights = weights
        self.parameters = {
            name: nn.Parameter(join(weight.data, remainders[name].to(weight.device)))
            for name, weight in weights.items()
        }
        self._hooks: list[RemovableHandle] = [
            weight.register_post_accumulate_grad_hook(self._collector(self.parameters[name]))
            for name, weight in weights.items()
        ]

    @staticmethod
    def _collector(master: nn.Parameter):
        """Adds each micro-batch's gradient in fp32 and frees it; sums in bf16 would lose the small ones."""

        def collect(weight: Tensor) -> None:
            if weight.grad is None:
                return
            if master.grad is None:
                master.grad = weight.grad.to(master.dtype)
            else:
                master.grad.add_(weight.grad)
            weight.grad = None

        return collect

    @torch.no_grad()
    def write_weights(self) -> None:
        """Give the model the bf16 half of each master."""
        for name, weight in self.weights.items():
            weight.copy_(half(self.parameters[name].data))

    def remainders(self) -> Remainders:
        """What the weights leave out of the masters now."""
        return {name: split(master.data)[1].cpu() for name, master in self.parameters.items()}

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

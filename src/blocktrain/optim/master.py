"""Masters: the active block's fp32 copy, which the optimizer updates, for models whose weights are stored in bf16.

activate   master = join(bf16 weight, low bits)             exact
backward   the first micro-batch's gradient stays in bf16; from the second one on gradients are summed in fp32
step       for each weight: its gradient in fp32, the optimizer updates the master, weight = bf16 half of it
retire     weight, low bits = split(master);  the master is freed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from blocktrain.chain.block import Block
from blocktrain.optim.precision import join, split, upper_half

LowBits = dict[str, Tensor]  # by parameter name: int16, on the host


class Masters:
    """What the optimizers update in place of a block's weights; they exist during a visit.

    For bf16 weights these are fp32 masters. For fp32 weights of which the block owns only some rows they are views of
    those rows. low_bits: the bits of the masters that their bf16 weights lack; a weight that is not named lacks none.

    Memory for a bf16 parameter: 4 bytes; its gradient takes 2 bytes with one micro-batch a step (and fp32 for one
    weight at a time), 4 with several. Autograd computes the gradient of all rows of a weight; only the block's rows are
    kept.
    """

    def __init__(self, block: Block, low_bits: LowBits):
        self.block = block
        self.parameters: dict[str, nn.Parameter] = {}
        self.collected: dict[str, Tensor] = {}  # gradients: in bf16 from one micro-batch, in fp32 from several
        self._factor: Tensor | None = None  # scales all gradients; applied when they are converted to fp32
        self._hooks: list[RemovableHandle] = []
        for name, weight in block.parameters.items():
            part, bits = block.part(name, weight.data), low_bits.get(name)
            self.parameters[name] = nn.Parameter(part.float() if bits is None else join(part, bits.to(part.device)))
            self._hooks.append(weight.register_post_accumulate_grad_hook(partial(self._collect, name)))

    def _collect(self, name: str, weight: Tensor) -> None:
        """Take a micro-batch's gradient from its weight, where the next ones would be added to it in bf16."""
        if weight.grad is None:
            return
        if self._factor is not None:
            self.gradients()
        gradient, before = self.block.part(name, weight.grad), self.collected.get(name)
        if before is not None:
            self.collected[name] = before.to(torch.float32).add_(gradient)
        else:
            self.collected[name] = gradient.clone() if name in self.block.rows else gradient
        weight.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """All collected gradients, converted to fp32."""
        for name in self.collected:
            self.collected[name] = self._in_fp32(name)
        self._factor = None
        return self.collected

    def _in_fp32(self, name: str) -> Tensor:
        gradient = self.collected[name].to(torch.float32)
        return gradient if self._factor is None else gradient.mul_(self._factor)

    def norm(self) -> Tensor:
        """Total 2-norm of the gradients in fp32 (0-d), computed without an fp32 copy of them."""
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in self.collected.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        return norm if self._factor is None else norm * self._factor

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by `factor` (0-d)."""
        self._factor = factor if self._factor is None else self._factor * factor

    def forget_gradients(self) -> None:
        """Free the gradients, and the factor that was to scale them."""
        self.collected.clear()
        self._factor = None

    @contextmanager
    def stepping(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, the masters `names` have their gradients in fp32, for an optimizer to step.

        At the end these gradients are freed, and the model's bf16 weights are the halves of their masters. (fp32
        weights share their memory with the masters.)
        """
        stepped = [name for name in names if name in self.collected]
        for name in stepped:
            self.parameters[name].grad = self._in_fp32(name)
            del self.collected[name]
        yield
        for name in stepped:
            self.parameters[name].grad = None
        self.write_weights(stepped)

    @torch.no_grad()
    def write_weights(self, names: Iterable[str] | None = None) -> None:
        """Set the model's bf16 weights to the halves of their masters: all of them, or those in `names`."""
        for name in self.parameters if names is None else names:
            weight = self.block.parameters[name]
            if weight.dtype == torch.bfloat16:
                self.block.part(name, weight).copy_(upper_half(self.parameters[name].data))

    def low_bits(self, names: Iterable[str]) -> LowBits:
        """The bits of the masters that the bf16 weights among `names` lack now. fp32 weights lack none."""
        return {
            name: split(self.parameters[name].data)[1].cpu()
            for name in names
            if name in self.parameters and self.block.parameters[name].dtype == torch.bfloat16
        }

    def close(self) -> None:
        """Stop collecting gradients: the block retires. Its weights are those of the last step."""
        for hook in self._hooks:
            hook.remove()
        self.forget_gradients()


@torch.no_grad()
def lower(parameter: nn.Parameter) -> Tensor:
    """Convert `parameter` to bf16, in place. Returns the low bits that bf16 leaves out (int16, on the host)."""
    if parameter.dtype == torch.bfloat16:
        return torch.zeros_like(parameter, dtype=torch.int16, device="cpu")
    parameter.data, low_bits = split(parameter.data.float())
    return low_bits.cpu()

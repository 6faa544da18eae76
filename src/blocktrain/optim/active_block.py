"""What exists only while a block is being trained: its optimizers, their state, and its masters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.chain.block import Block
from blocktrain.errors import ConfigError
from blocktrain.optim.factory import steps_parameters_independently
from blocktrain.optim.master import Masters
from blocktrain.optim.state import BlockState


@dataclass(eq=False)
class Active:
    """One visit's block. `trained` is what the optimizers move, by name: the masters, or the weights themselves.

    used: norms of this step's gradients, where the backward pass uses them up (see `in_backward.py`).
    """

    block: Block
    trained: Mapping[str, nn.Parameter]
    optimizers: list[torch.optim.Optimizer]
    masters: Masters | None = None
    used: list[Tensor] | None = None

    def step(self) -> None:
        """One step of each optimizer; with masters, the model's weights follow."""
        if self.used is not None:  # the backward pass was the step
            self.used.clear()
            return
        for optimizer in self.optimizers:
            if self.masters is None:
                optimizer.step()
                continue
            names = self.moved_by(optimizer)
            # One weight at a time, so that one gradient at a time is in fp32.
            for together in [[name] for name in names] if steps_parameters_independently(optimizer) else [names]:
                self.step_with(optimizer, together)
        if self.masters is not None:
            self.masters.forget_gradients()

    def step_with(self, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
        """A step of `optimizer` where of all it moves at most `names` have gradients."""
        with self.masters.stepping(names) if self.masters is not None else nullcontext():
            optimizer.step()

    def moved_by(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Names of what `optimizer` moves."""
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [name for name, parameter in self.trained.items() if id(parameter) in owned]

    def write_weights(self) -> None:
        """Give the model what the masters hold, where there are any."""
        if self.masters is not None:
            self.masters.write_weights()

    def zero_grad(self) -> None:
        """Free the gradients, wherever they are collected."""
        for parameter in self.block.parameters.values():
            parameter.grad = None
        if self.masters is not None:
            self.masters.forget_gradients()

    def gradients(self) -> list[Tensor]:
        """Of the parameters that have one, in the precision they are accumulated in."""
        if self.masters is not None:
            return list(self.masters.gradients().values())
        return [parameter.grad for parameter in self.trained.values() if parameter.grad is not None]

    def gradient(self, name: str) -> Tensor | None:
        """The one collected for `name`, itself."""
        return self.trained[name].grad if self.masters is None else self.masters.collected.get(name)

    def put_gradient(self, name: str, gradient: Tensor | None) -> None:
        """In its place; None takes it away. With masters it may be of any floating dtype."""
        if self.masters is None:
            self.trained[name].grad = gradient
        elif gradient is None:
            self.masters.collected.pop(name, None)
        else:
            self.masters.collected[name] = gradient

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`. Gradients that were used have their norm told, once."""
        if self.used is not None:
            if max_norm != float("inf"):
                raise ConfigError(f"the backward pass has used the gradients: they cannot be clipped to {max_norm:g}")
            norms, self.used = self.used, []
            return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        if self.masters is None:
            norm = torch.nn.utils.get_total_norm(self.gradients())
            if max_norm != float("inf"):
                torch.nn.utils.clip_grads_with_norm_(self.trained.values(), max_norm, norm)
            return norm
        norm = self.masters.norm()
        if max_norm != float("inf"):
            self.masters.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def state(self, member: Block | None = None) -> BlockState:
        """The optimizers' state by parameter name, not copied; entries that hold nothing are left out.

        member: only what is of that one of the blocks that are trained together.
        """
        mine = (member or self.block).parameters
        names = {id(parameter): name for name, parameter in self.trained.items() if name in mine}
        return {
            names[id(parameter)]: {key: value for key, value in entries.items() if value is not None}
            for optimizer in self.optimizers
            for parameter, entries in optimizer.state.items()
            if entries and id(parameter) in names
        }

    def entries(self) -> dict[str, dict[str, Any]]:
        """Each optimizer's own state by parameter name, live; empty where it holds nothing yet."""
        names = {id(parameter): name for name, parameter in self.trained.items()}
        return {
            names[id(parameter)]: optimizer.state[parameter]
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def state_bytes(self) -> int:
        """Bytes of the state's tensors."""
        return sum(v.nbytes for entries in self.state().values() for v in entries.values() if torch.is_tensor(v))

    def tensors(self) -> dict[str, list[Tensor]]:
        """What exists only during the visit, by part of memory: "master", "gradients", "moments"."""
        weights, collected = self.block.parameters, () if self.masters is None else self.masters.collected.values()
        return {
            "master": [p.data for name, p in self.trained.items() if p.dtype != weights[name].dtype],  # else it is they
            "gradients": [*collected, *(p.grad for p in self.trained.values() if p.grad is not None)],
            "moments": [v for entries in self.state().values() for v in entries.values() if torch.is_tensor(v)],
        }

    def restore(self, state: BlockState) -> None:
        """Give each optimizer a copy of the state of its parameters, on the device where it expects it."""
        names = {id(parameter): name for name, parameter in self.trained.items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                # As `Optimizer.load_state_dict`: step counts stay on the host unless the update is one device kernel.
                counts_on_device = bool(group.get("fused") or group.get("capturable"))
                for parameter in group["params"]:
                    entries = state.get(names[id(parameter)])
                    if entries is not None:
                        optimizer.state[parameter] = {
                            key: _place(key, value, parameter, counts_on_device) for key, value in entries.items()
                        }


def _place(key: str, value: Any, parameter: nn.Parameter, counts_on_device: bool) -> Any:
    if not torch.is_tensor(value):
        return value
    on_host = key == "step" and not counts_on_device
    return value.to("cpu" if on_host else parameter.device, copy=True)

"""The active block of a visit: its optimizers with their state, its gradients, and its masters."""

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
from blocktrain.optim.state_store import BlockState


@dataclass(eq=False)
class ActiveBlock:
    """The block of one visit, and everything that exists only during this visit.

    trained: what the optimizers update, by parameter name: the masters, or the weights themselves.
    stepped_norms: with `in_backward`, the norms of the gradients that this step's backward pass has used up; else None.
    """

    block: Block
    trained: Mapping[str, nn.Parameter]
    optimizers: list[torch.optim.Optimizer]
    masters: Masters | None = None
    stepped_norms: list[Tensor] | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, as in `torch.optim.Optimizer`."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step of each optimizer. The model's weights follow their masters."""
        if self.stepped_norms is not None:  # the backward pass was the step
            self.stepped_norms.clear()
            return
        for optimizer in self.optimizers:
            if self.masters is None:
                optimizer.step()
                continue
            names = self.parameters_of(optimizer)
            # One weight at a time where possible, so that one gradient at a time is in fp32.
            for group in [[name] for name in names] if steps_parameters_independently(optimizer) else [names]:
                self.step_with(optimizer, group)
        if self.masters is not None:
            self.masters.forget_gradients()

    def step_with(self, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
        """One step of `optimizer` on the parameters `names`; no other parameter of it may have a gradient."""
        with self.masters.stepping(names) if self.masters is not None else nullcontext():
            optimizer.step()

    def parameters_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Names of the parameters that `optimizer` updates."""
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [name for name, parameter in self.trained.items() if id(parameter) in owned]

    def write_weights(self) -> None:
        """Set the model's weights to the values of their masters, where there are any."""
        if self.masters is not None:
            self.masters.write_weights()

    # -- gradients ------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Free the gradients of the weights and of the masters."""
        for parameter in self.block.parameters.values():
            parameter.grad = None
        if self.masters is not None:
            self.masters.forget_gradients()

    def gradients(self) -> list[Tensor]:
        """All gradients, in the precision in which they are accumulated."""
        if self.masters is not None:
            return list(self.masters.gradients().values())
        return [parameter.grad for parameter in self.trained.values() if parameter.grad is not None]

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of one parameter, not copied; None if it has none."""
        return self.trained[name].grad if self.masters is None else self.masters.collected.get(name)

    def put_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Replace the gradient of one parameter; None frees it. With masters it may have any floating dtype."""
        if self.masters is None:
            self.trained[name].grad = gradient
        elif gradient is None:
            self.masters.collected.pop(name, None)
        else:
            self.masters.collected[name] = gradient

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`. With `in_backward` it returns the norm of the gradients that were used
        up, once, and raises `ConfigError` for any `max_norm` but `inf`."""
        if self.stepped_norms is not None:
            if max_norm != float("inf"):
                raise ConfigError(
                    f"in_backward applies gradients in the backward pass, so they cannot be clipped to {max_norm:g}"
                )
            norms, self.stepped_norms = self.stepped_norms, []
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

    # -- optimizer state ------------------------------------------------------------------------------------------

    def state(self, member: Block | None = None) -> BlockState:
        """The optimizers' state by parameter name, not copied; entries that are None are left out.

        member: one of the blocks that are trained together, to get only its part of the state.
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
        """Each optimizer's own state by parameter name: the live dictionaries, empty before the first step."""
        names = {id(parameter): name for name, parameter in self.trained.items()}
        return {
            names[id(parameter)]: optimizer.state[parameter]
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def restore(self, state: BlockState) -> None:
        """Give each optimizer a copy of its parameters' state, on the device where it expects it."""
        names = {id(parameter): name for name, parameter in self.trained.items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                # As in `Optimizer.load_state_dict`: step counts stay on the host unless the update is one kernel.
                counts_on_device = bool(group.get("fused") or group.get("capturable"))
                for parameter in group["params"]:
                    entries = state.get(names[id(parameter)])
                    if entries is None:
                        continue
                    restored = dict(entries)
                    for key, value in entries.items():
                        if torch.is_tensor(value):
                            on_host = key == "step" and not counts_on_device
                            restored[key] = value.to("cpu" if on_host else parameter.device, copy=True)
                    optimizer.state[parameter] = restored

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors that exist only during the visit, by part of memory: "master", "gradients", "moments"."""
        weights, collected = self.block.parameters, () if self.masters is None else self.masters.collected.values()
        return {
            # A trained parameter with the dtype of its weight is that weight, or a view of it.
            "master": [p.data for name, p in self.trained.items() if p.dtype != weights[name].dtype],
            "gradients": [*collected, *(p.grad for p in self.trained.values() if p.grad is not None)],
            "moments": [v for entries in self.state().values() for v in entries.values() if torch.is_tensor(v)],
        }

"""What exists only while a block is being trained: its optimizers, their state, and its masters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from blocktrain.blocks.block import Block
from blocktrain.optim.master import Masters
from blocktrain.optim.state import BlockState


@dataclass(eq=False)
class Active:
    """One visit's block. `trained` is what the optimizers move, by name: the masters, or the weights themselves."""

    block: Block
    trained: Mapping[str, nn.Parameter]
    optimizers: list[torch.optim.Optimizer]
    masters: Masters | None = None

    def state(self) -> BlockState:
        """The optimizers' state by parameter name, not copied; entries that hold nothing are left out."""
        names = {id(parameter): name for name, parameter in self.trained.items()}
        return {
            names[id(parameter)]: {key: value for key, value in entries.items() if value is not None}
            for optimizer in self.optimizers
            for parameter, entries in optimizer.state.items()
            if entries
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

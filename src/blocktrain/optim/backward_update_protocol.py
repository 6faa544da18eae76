"""The seam for updates inside a visit's backward pass: weights that are moved as soon as their gradient is complete.

    backward     prefix     active block                                  tail
                            <- step_in_backward.py: its own weights    <- contrib/learning_tail.py: weights above it

Such an update needs no gradient that outlives its weight's turn. The price: every backward pass is a step, so gradients
of micro-batches or of several processes cannot be summed first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from blocktrain.chain.block import Block, Partition
from blocktrain.errors import ConfigError
from blocktrain.optim.active_block import ActiveBlock
from blocktrain.optim.offloaded_weights import FrozenPlace
from blocktrain.optim.precision import Precision


class BackwardUpdate(Protocol):
    """Moves weights inside the backward passes of every visit. `BlockOptimizer(tail=...)` takes one."""

    @property
    def setting(self) -> str:
        """How a user has asked for it, as error messages quote it: "tail = 'sgd'"."""
        ...

    def require(self, partition: Partition, precision: Precision, frozen: FrozenPlace) -> None:
        """Raise `ConfigError` if these weights cannot be moved in a backward pass."""
        ...

    def also_moves(self, partition: Partition, block: Block) -> dict[str, nn.Parameter]:
        """The parameters, by name, that it moves in a visit to `block` beyond the block's own."""
        ...

    def updating(self, partition: Partition, active: ActiveBlock) -> AbstractContextManager[None]:
        """Inside, every backward pass moves weights. There must be exactly one backward pass a step.

        It is entered when `active` is activated and exited before it retires.
        """
        ...


def require_single_process(setting: str) -> None:
    """Raise `ConfigError` if there are several processes, whose gradients must be summed before weights move."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_distributed and torch.distributed.get_world_size() > 1:
        raise ConfigError(
            f"{setting} moves weights inside the backward pass, before gradients of several processes are summed: use "
            "one process"
        )

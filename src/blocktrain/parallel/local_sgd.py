"""Steps apart, averaged now and then: for links so slow that even one block's gradients take longer than a step.

    rank 0   step step step step |            | step ...
    rank 1   step step step step |            | step ...
                                  mean of all: weights by an outer Nesterov step, moments as they are

    d = anchor - mean of the weights        v = momentum v + d        weights = anchor - lr (d + momentum v)

This is DiLoCo (arXiv 2311.08105) on the active block alone, with one thing added: the optimizer's moments are averaged
too. Then all ranks are equal after an averaging, one of them can write the checkpoint, and any number of ranks can
resume from it. For AdamW it makes an averaging three times as large.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from blocktrain.errors import ConfigError
from blocktrain.parallel.data_parallel import (
    DTYPES,
    Active,
    ByRows,
    DataParallel,
    DistributedConfig,
    ReplicatedBase,
    average,
    batch_norm_statistics,
)
from blocktrain.parallel.ranks import Ranks
from blocktrain.parallel.replicas import assert_replicas_equal

MOMENTUM = "outer_momentum"  # an entry of the optimizer's state, so that it is kept and saved as the moments are


class LocalSGD(ReplicatedBase):
    """Averages the active block after every `config.sync_every`-th step of the run and at the end of a visit.

    Device memory in a visit: a copy of what is trained, and as much again for the moment of an averaging.
    """

    def __init__(self, ranks: Ranks, config: DistributedConfig):
        assert config.sync_every is not None, "steps are taken apart only where sync_every says how many"
        super().__init__(ranks, config)
        self.settled = True
        self._every = config.sync_every
        self._anchor: dict[str, Tensor] = {}  # what the ranks last agreed on

    @contextmanager
    def visit(self, active: Active) -> Iterator[None]:
        """Starts from what all ranks have; ends with an averaging, where steps were taken since the last."""
        self._active = active
        self._anchor = {name: parameter.detach().clone() for name, parameter in active.trained.items()}
        yield
        if not self.settled:
            self._average()
        assert_replicas_equal(self.ranks, active.block, active.trained)
        self._active, self._anchor = None, {}

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Gradients stay here, scaled from this rank's part of the step's mean loss to the mean over its own rows. A
        missing one is a zero, so that every rank has the same moments to average."""
        yield
        active = self._in_visit()
        for name, parameter in active.trained.items():
            gradient = active.gradient(name)
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            active.put_gradient(name, gradient.mul_(self.ranks.size))

    def stepped(self, step: int) -> None:
        """Average when it is time."""
        self.settled = False
        if (step + 1) % self._every == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        active = self._in_visit()
        dtype = DTYPES[self.config.reduce_dtype]
        moved = {name: self._anchor[name] - parameter.detach() for name, parameter in active.trained.items()}
        average(self.ranks, list(moved.values()), dtype=dtype, bucket_bytes=self.config.bucket_bytes)
        for name, entries in active.entries().items():
            self._outer_step(name, active.trained[name], moved[name], entries)
        average(self.ranks, self._moments(active), dtype=dtype, bucket_bytes=self.config.bucket_bytes)
        average(self.ranks, batch_norm_statistics(active.block))
        active.write_weights()
        self.settled = True

    def _outer_step(self, name: str, parameter: nn.Parameter, moved: Tensor, entries: dict[str, Tensor]) -> None:
        """`moved`: anchor minus mean."""
        momentum = self.config.outer_momentum
        if momentum and (entries or moved.any()):  # not before the optimizer's first step, which would find it there
            velocity = entries.setdefault(MOMENTUM, torch.zeros_like(moved))
            velocity.mul_(momentum).add_(moved)
            moved = moved + momentum * velocity
        parameter.copy_(self._anchor[name] - self.config.outer_lr * moved)
        self._anchor[name].copy_(parameter)

    @staticmethod
    def _moments(active: Active) -> list[Tensor]:
        """What the optimizer remembers of the gradients; step counts and the outer momentum are equal everywhere."""
        found = []
        for name, entries in active.entries().items():
            for key, value in entries.items():
                if torch.is_tensor(value) and key not in ("step", MOMENTUM):
                    if not value.is_floating_point():
                        raise ConfigError(
                            f"distributed.sync_every averages what the optimizer keeps, and '{key}' of '{name}' is "
                            f"{str(value.dtype).removeprefix('torch.')}; leave sync_every out for this optimizer"
                        )
                    found.append(value)
        return found


def parallel(ranks: Ranks, config: DistributedConfig) -> ByRows:
    """The way of sharing a step's rows that `config` asks for."""
    return DataParallel(ranks, config) if config.sync_every is None else LocalSGD(ranks, config)

"""Local SGD: ranks take steps of their own and average the active block every H steps, for networks so slow that
sending even one block's gradients takes longer than a step.

    rank 0   step step step step |            | step ...
    rank 1   step step step step |            | step ...
                                  mean over the ranks: weights by an outer Nesterov step, moments without one

    d = anchor - mean of the weights        v = momentum v + d        weights = anchor - lr (d + momentum v)

This is DiLoCo (arXiv 2311.08105) applied to the active block only, with one addition: the optimizer's moments are
averaged too. So all ranks are equal after an average, one of them can write the checkpoint, and any number of ranks can
resume from it. For AdamW this makes an average three times as large.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from blocktrain.errors import ConfigError
from blocktrain.parallel.config import TORCH_DTYPES, DistributedConfig
from blocktrain.parallel.protocol import BatchParallel, TrainedBlock
from blocktrain.parallel.ranks import Ranks
from blocktrain.parallel.replicas import assert_replicas_equal, average_over_ranks, batch_norm_statistics

MOMENTUM = "outer_momentum"  # an entry of the optimizer's state, so that it is kept and saved like the moments


class LocalSGD(BatchParallel):
    """Averages the active block after every `config.sync_every`-th step of the run and at the end of a visit.

    Device memory in a visit: a copy of what is trained, and as much again during an average.
    """

    def __init__(self, ranks: Ranks, config: DistributedConfig):
        assert config.sync_every is not None, "sync_every is the number of local steps"
        super().__init__(ranks, config)
        self.in_sync = True
        self._every = config.sync_every
        self._anchor: dict[str, Tensor] = {}  # the weights after the last average, equal on every rank

    @contextmanager
    def visit(self, active: TrainedBlock) -> Iterator[None]:
        """The weights are equal on every rank at the start, and by an average at the end."""
        self._active = active
        self._anchor = {name: parameter.detach().clone() for name, parameter in active.trained.items()}
        yield
        if not self.in_sync:
            self._average()
        assert_replicas_equal(self.ranks, active.block, active.trained)
        self._active, self._anchor = None, {}

    @contextmanager
    def gradient_sync(self) -> Iterator[None]:
        """Gradients are not sent. They are scaled from this rank's part of the step's mean loss to the mean over its
        own rows; a missing one becomes zero, so that every rank has moments of the same parameters to average."""
        yield
        active = self._in_visit()
        for name, parameter in active.trained.items():
            gradient = active.gradient(name)
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            active.put_gradient(name, gradient.mul_(self.ranks.size))

    def after_step(self, step: int) -> None:
        """Average after every `sync_every`-th step."""
        self.in_sync = False
        if (step + 1) % self._every == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        active = self._in_visit()
        dtype, momentum = TORCH_DTYPES[self.config.reduce_dtype], self.config.outer_momentum
        delta = {name: self._anchor[name] - parameter.detach() for name, parameter in active.trained.items()}
        average_over_ranks(self.ranks, list(delta.values()), dtype=dtype, bucket_bytes=self.config.bucket_bytes)
        for name, entries in active.entries().items():
            weights, update = active.trained[name], delta[name]  # the anchor minus the mean
            if momentum and (entries or update.any()):  # an optimizer initializes its state only if that is empty
                velocity = entries.setdefault(MOMENTUM, torch.zeros_like(update))
                velocity.mul_(momentum).add_(update)
                update = update + momentum * velocity
            weights.copy_(self._anchor[name] - self.config.outer_lr * update)
            self._anchor[name].copy_(weights)
        average_over_ranks(self.ranks, self._moments(active), dtype=dtype, bucket_bytes=self.config.bucket_bytes)
        average_over_ranks(self.ranks, batch_norm_statistics(active.block))
        active.write_weights()
        self.in_sync = True

    @staticmethod
    def _moments(active: TrainedBlock) -> list[Tensor]:
        """The optimizer's averages of gradients. Step counts and the outer momentum are equal on every rank already."""
        moments = []
        for name, entries in active.entries().items():
            for key, value in entries.items():
                if torch.is_tensor(value) and key not in ("step", MOMENTUM):
                    if not value.is_floating_point():
                        raise ConfigError(
                            f"distributed.sync_every averages the optimizer's state, and '{key}' of '{name}' is "
                            f"{str(value.dtype).removeprefix('torch.')}; leave sync_every out for this optimizer"
                        )
                    moments.append(value)
        return moments

"""Data parallel training of one block at a time: only the active block's gradients travel.

    rank 0   forward  backward ..........  | clip, step
    rank 1   forward  backward ..........  | clip, step          the same step everywhere
                        sum  sum  sum                            bucket by bucket, while the backward pass goes on

Hooks and buckets are made when a visit begins and last as long as it does. There is no DistributedDataParallel here: it
fixes at its construction which parameters it reduces, and after a switch of block it reduces none of the new ones and
says nothing.

The losses of the ranks are weighted by their share of the step's rows, so gradients are summed, not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from blocktrain.chain.block import Block
from blocktrain.errors import ConfigError
from blocktrain.parallel.bucketed_all_reduce import BucketedAllReduce, buckets
from blocktrain.parallel.ranks import Ranks
from blocktrain.parallel.replicas import assert_replicas_equal
from blocktrain.parallel.stages import Schedule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How several processes work together (started with torchrun; one alone needs none of this).

    layout: what the processes share out: the "rows" of a step, each with the whole model (data parallel); the "layers"
        (a pipeline); or rows and, in equal parts, every weight: "shards" (FSDP2). One process alone has all of it.
    pipeline: the schedule of layout "layers"; "interleaved" has M stages a process.
    reduce_dtype: in which gradients travel and are summed.
    bucket_bytes: of gradients that travel together.
    timeout_seconds: how long a process waits for another before it gives up.
    sync_every: None sums gradients in each step; H takes H steps apart and then averages the active block.
    outer_lr, outer_momentum: of the Nesterov step along that average (DiLoCo, arXiv 2311.08105, section 2).
    """

    layout: Literal["rows", "layers", "shards"] = "rows"
    pipeline: Schedule = "1f1b"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    bucket_bytes: int = 25 * 2**20
    timeout_seconds: float = 600.0
    sync_every: int | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes must be at least 1, not {self.bucket_bytes}")
        if not self.timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be positive, not {self.timeout_seconds:g}")
        if self.sync_every is not None and self.sync_every < 1:
            raise ConfigError(f"sync_every must be at least 1, not {self.sync_every}")
        if self.sync_every is not None and self.layout != "rows":
            raise ConfigError(
                f"sync_every takes steps apart, each process its own: set layout = 'rows', not '{self.layout}'"
            )
        if not self.outer_lr > 0 or not 0 <= self.outer_momentum < 1:
            raise ConfigError(
                f"outer_lr must be positive and outer_momentum in [0, 1), not {self.outer_lr:g} and "
                f"{self.outer_momentum:g}"
            )


class Active(Protocol):
    """What is needed of the active block's optimizer."""

    block: Block
    trained: Mapping[str, nn.Parameter]  # by name, what is moved: the block's weights, or their masters

    def gradient(self, name: str) -> Tensor | None:
        """The gradient collected for one of them, itself; None where there is none."""
        ...

    def put_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Put `gradient` in its place; None takes it away."""
        ...

    def entries(self) -> Mapping[str, dict[str, Any]]:
        """By name, the optimizer's own state of each of them, live."""
        ...

    def write_weights(self) -> None:
        """Give the model what `trained` holds."""
        ...

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale what was collected here to a total 2-norm of at most `max_norm`; returns the norm before (0-d)."""
        ...


class Parallel(Protocol):
    """How the ranks come to the same weights. Used alike by one process and by many."""

    settled: bool  # whether a checkpoint can be taken at this moment

    def share(self, block: Block) -> Block:
        """What this rank trains of `block`: all of it, unless the layers are shared out."""
        ...

    def visit(self, active: Active) -> AbstractContextManager[None]:
        """Around the steps of a visit. At its end all ranks have the same weights; raises `PeerError` if not."""
        ...

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the step's gradients to a total 2-norm of at most `max_norm`; returns the norm before."""
        ...

    def stepped(self, step: int) -> None:
        """0-based `step` has been taken."""
        ...

    def settle(self) -> None:
        """Give all ranks the weights as they are now, in the middle of a visit."""
        ...


class ByRows(Parallel, Protocol):
    """Each rank runs the whole model on its own rows."""

    def last_backward(self) -> AbstractContextManager[None]:
        """Around the last backward pass of a step. Afterwards the gradients are those to step with."""
        ...


class ReplicatedBase:
    """What all ways have in common whose ranks train the same block, each all of it."""

    def __init__(self, ranks: Ranks, config: DistributedConfig):
        self.ranks = ranks
        self.config = config
        self._active: Active | None = None

    def share(self, block: Block) -> Block:
        """The block itself."""
        return block

    def settle(self) -> None:
        """Nothing to do: weights are asked for only where all ranks have the same."""

    def clip_grad_norm(self, max_norm: float) -> float:
        """The active block's own."""
        return float(self._in_visit().clip_grad_norm(max_norm))

    def _in_visit(self) -> Active:
        assert self._active is not None, "steps are taken inside a visit"
        return self._active


class DataParallel(ReplicatedBase):
    """Sums the active block's gradients over the ranks in each step."""

    settled = True

    def __init__(self, ranks: Ranks, config: DistributedConfig):
        super().__init__(ranks, config)
        self._sum: GradientSum | None = None
        self._statistics: list[Tensor] = []

    @contextmanager
    def visit(self, active: Active) -> Iterator[None]:
        """Hooks on the active block's weights inside; afterwards its weights are compared."""
        self._active, self._statistics = active, batch_norm_statistics(active.block)
        with GradientSum(self.ranks, active, self.config) as self._sum:
            yield
            assert_replicas_equal(self.ranks, active.block, active.trained)

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Gradients leave as they arrive; at the end they are sums."""
        assert self._sum is not None, "gradients are summed inside a visit"
        with self._sum.running():
            yield
        average(self.ranks, self._statistics)

    def stepped(self, step: int) -> None:
        """All ranks have taken the same step."""


class GradientSum:
    """Adds up the gradients of one visit's block over the ranks, bucket by bucket.

    All ranks start the same sums in the same order, whatever order their gradients arrive in. A gradient that a rank
    lacks (an expert that none of its rows chose) counts as zero; one that all lack stays away.
    """

    def __init__(self, ranks: Ranks, active: Active, config: DistributedConfig):
        dtype = DTYPES[config.reduce_dtype]
        names = list(active.trained)[::-1]  # about the order in which a backward pass arrives
        sizes = [active.trained[name].numel() * dtype.itemsize for name in names]
        self._ranks = ranks
        self._active = active
        self._flight = BucketedAllReduce(ranks, dtype=dtype)
        self._buckets = [
            [names[index] for index in bucket] for bucket in buckets(sizes, config.bucket_bytes) if ranks.size > 1
        ]
        self._where = {name: number for number, bucket in enumerate(self._buckets) for name in bucket}
        self._running = False
        self._missing: list[set[str]] = []  # of each bucket, in this backward pass
        self._launched = 0
        self._hooks = ExitStack()
        for name in self._where:
            handle = active.block.parameters[name].register_post_accumulate_grad_hook(self._arrival(name))
            self._hooks.callback(handle.remove)

    def __enter__(self) -> GradientSum:
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the backward pass that completes the gradients."""
        self._missing, self._launched, self._running = [set(bucket) for bucket in self._buckets], 0, True
        try:
            yield
        finally:
            self._running = False
        self._finish()

    def _arrival(self, name: str):
        """After the hook of the masters, which was there first: what came in is where it is kept."""

        def arrived(_weight: Tensor) -> None:
            if self._running:
                self._missing[self._where[name]].discard(name)
                while self._launched < len(self._buckets) and not self._missing[self._launched]:
                    self._launch_next()

        return arrived

    def _launch_next(self) -> None:
        gradients = []
        for name in self._buckets[self._launched]:
            trained, gradient = self._active.trained[name], self._active.gradient(name)
            if gradient is None:
                gradient = torch.zeros_like(trained)
            if (
                trained is not self._active.block.parameters[name]
            ):  # a master's has the dtype of its last sum: on every rank the same
                gradient = gradient.to(self._flight.dtype)
            self._active.put_gradient(name, gradient)
            gradients.append(gradient)
        self._flight.launch(gradients)
        self._launched += 1

    def _finish(self) -> None:
        """Launch what the backward pass did not complete; wait; take away what no rank had."""
        held = torch.tensor([self._active.gradient(name) is not None for name in self._where], dtype=torch.int32)
        while self._launched < len(self._buckets):
            self._launch_next()
        counted = self._ranks.all_reduce(held)
        self._flight.land()
        counted()
        for name, count in zip(self._where, held.tolist(), strict=True):
            if not count:
                self._active.put_gradient(name, None)


def batch_norm_statistics(block: Block) -> list[Tensor]:
    """Running means and variances of the block's BatchNorm layers: each rank moves them by its own rows."""
    norms = [part for module in block.modules() for part in module.modules() if isinstance(part, _BatchNorm)]
    found = [statistics for norm in norms for statistics in (norm.running_mean, norm.running_var)]
    return [statistics for statistics in found if statistics is not None]


@torch.no_grad()
def average(
    ranks: Ranks, tensors: list[Tensor], *, dtype: torch.dtype = torch.float32, bucket_bytes: int = 25 * 2**20
) -> None:
    """Replace each tensor by its mean over the ranks."""
    if ranks.size == 1 or not tensors:
        return
    flight = BucketedAllReduce(ranks, dtype=dtype)
    for bucket in buckets([tensor.numel() * dtype.itemsize for tensor in tensors], bucket_bytes):
        for index in bucket:
            tensors[index].div_(ranks.size)
        flight.launch([tensors[index] for index in bucket])
    flight.land()

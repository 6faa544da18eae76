"""Data parallel training of one block at a time: only the gradients of the active block are all-reduced.

    rank 0   forward  backward ..........  | clip, step
    rank 1   forward  backward ..........  | clip, step          the same step on every rank
                        sum  sum  sum                            bucket by bucket, during the backward pass

Hooks and buckets are made when a visit begins and removed when it ends. DistributedDataParallel is not used: it fixes
in its constructor which parameters it reduces, and after a switch of block it reduces none of the new ones, without an
error.

The losses of the ranks are weighted by their share of the step's rows, so gradients are summed, not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from blocktrain.parallel.bucketed_all_reduce import BucketedAllReduce, make_buckets
from blocktrain.parallel.config import TORCH_DTYPES, DistributedConfig
from blocktrain.parallel.protocol import BatchParallel, TrainedBlock
from blocktrain.parallel.ranks import Ranks
from blocktrain.parallel.replicas import assert_replicas_equal, average_over_ranks, batch_norm_statistics


class DataParallel(BatchParallel):
    """Every rank has the whole model; the active block's gradients are summed over the ranks in each step."""

    def __init__(self, ranks: Ranks, config: DistributedConfig):
        super().__init__(ranks, config)
        self._gradients: GradientAllReduce | None = None
        self._statistics: list[Tensor] = []

    @contextmanager
    def visit(self, active: TrainedBlock) -> Iterator[None]:
        """Hooks are on the active block's weights inside; at the end its weights are compared."""
        self._active, self._statistics = active, batch_norm_statistics(active.block)
        self._gradients = GradientAllReduce(self.ranks, active, self.config)
        try:
            yield
            assert_replicas_equal(self.ranks, active.block, active.trained)
        finally:
            self._gradients.close()

    @contextmanager
    def gradient_sync(self) -> Iterator[None]:
        """Gradients are sent as the backward pass completes them; at the end they are sums."""
        assert self._gradients is not None, "gradients are summed inside a visit"
        with self._gradients.running():
            yield
        average_over_ranks(self.ranks, self._statistics)


class GradientAllReduce:
    """Sums the gradients of one visit's block over the ranks, bucket by bucket.

    All ranks start the same all-reduces in the same order, whatever order their gradients arrive in. A gradient that a
    rank lacks (of an expert that none of its rows chose) counts as zero; one that all ranks lack stays None.
    """

    def __init__(self, ranks: Ranks, active: TrainedBlock, config: DistributedConfig):
        dtype = TORCH_DTYPES[config.reduce_dtype]
        names = list(active.trained)[::-1]  # roughly the order in which a backward pass completes them
        sizes = [active.trained[name].numel() * dtype.itemsize for name in names]
        self._ranks = ranks
        self._active = active
        self._all_reduce = BucketedAllReduce(ranks, dtype=dtype)
        self._buckets = [
            [names[index] for index in bucket] for bucket in make_buckets(sizes, config.bucket_bytes) if ranks.size > 1
        ]
        self._bucket_of = {name: number for number, bucket in enumerate(self._buckets) for name in bucket}
        self._running = False
        self._missing: list[set[str]] = []  # by bucket: the gradients that this backward pass has not completed
        self._started = 0  # buckets
        # They run after the hooks of the masters, which were registered first and move each gradient to its place.
        self._hooks = [
            active.block.parameters[name].register_post_accumulate_grad_hook(partial(self._on_gradient, name))
            for name in self._bucket_of
        ]

    def close(self) -> None:
        """Remove the hooks: the visit is over."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wraps the backward pass that completes the gradients. At the end they are sums; one that no rank has is None
        again."""
        self._missing, self._started, self._running = [set(bucket) for bucket in self._buckets], 0, True
        try:
            yield
        finally:
            self._running = False
        present = torch.tensor([self._active.gradient(name) is not None for name in self._bucket_of], dtype=torch.int32)
        while self._started < len(self._buckets):  # what the backward pass has not completed
            self._start_next_bucket()
        wait_for_counts = self._ranks.all_reduce(present)
        self._all_reduce.wait()
        wait_for_counts()
        for name, count in zip(self._bucket_of, present.tolist(), strict=True):
            if not count:
                self._active.put_gradient(name, None)

    def _on_gradient(self, name: str, _weight: Tensor) -> None:
        if self._running:
            self._missing[self._bucket_of[name]].discard(name)
            while self._started < len(self._buckets) and not self._missing[self._started]:
                self._start_next_bucket()

    def _start_next_bucket(self) -> None:
        gradients = []
        for name in self._buckets[self._started]:
            trained, gradient = self._active.trained[name], self._active.gradient(name)
            if gradient is None:
                gradient = torch.zeros_like(trained)
            if trained is not self._active.block.parameters[name]:
                # A master's gradient is in bf16 after one micro-batch and in fp32 after several; ranks may differ.
                gradient = gradient.to(self._all_reduce.dtype)
            self._active.put_gradient(name, gradient)
            gradients.append(gradient)
        self._all_reduce.start(gradients)
        self._started += 1

"""Sums on their way: tensors added up over the ranks in buckets, a few at once, so that the wire is busy and little
memory is spent on copies.

    tensors    a b c   D       e f            D: larger than a bucket, summed where it lies
    buckets   [a b c] [D]     [e f]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blocktrain.parallel.ranks import Ranks

IN_FLIGHT = 4  # buckets at once: their copies are all the memory it takes


class BucketedAllReduce:
    """Sums over `ranks` in `dtype`, whatever the tensors' own."""

    def __init__(self, ranks: Ranks, *, dtype: torch.dtype):
        self.ranks = ranks
        self.dtype = dtype
        self._flying: deque[tuple[Sequence[Tensor], Tensor, Callable[[], None]]] = deque()

    def launch(self, tensors: Sequence[Tensor]) -> None:
        """Start adding up one bucket of `tensors`, in place; they must not be touched before `land`."""
        if len(self._flying) == IN_FLIGHT:
            self._land_one()
        if len(tensors) == 1 and tensors[0].dtype == self.dtype and tensors[0].is_contiguous():
            flat = tensors[0]
        else:
            flat = torch.cat([tensor.reshape(-1).to(self.dtype) for tensor in tensors])
        self._flying.append((tensors, flat, self.ranks.all_reduce(flat)))

    def land(self) -> None:
        """Wait for all that was launched."""
        while self._flying:
            self._land_one()

    def _land_one(self) -> None:
        tensors, flat, wait = self._flying.popleft()
        wait()
        if flat is not tensors[0]:
            for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(piece.view_as(tensor))


def buckets(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Indices of items of `sizes` in order, in groups of at most `most` in sum; a larger one is alone.

    >>> buckets([3, 3, 9, 1, 2], 6)
    [[0, 1], [2], [3, 4]]
    """
    groups: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(index)
        room -= size
    return groups

"""All-reduces of many tensors in buckets, several in flight at once, so that the network is busy and little memory is
spent on copies.

    tensors    a b c   D       e f            D: larger than a bucket, summed in place
    buckets   [a b c] [D]     [e f]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blocktrain.parallel.ranks import Ranks

MAX_IN_FLIGHT = 4  # buckets; their flat copies are all the memory that this takes


class BucketedAllReduce:
    """Sums tensors over `ranks` in `dtype`, whatever the tensors' own dtype is."""

    def __init__(self, ranks: Ranks, *, dtype: torch.dtype):
        self.ranks = ranks
        self.dtype = dtype
        self._in_flight: deque[tuple[Sequence[Tensor], Tensor, Callable[[], None]]] = deque()

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Start summing one bucket of `tensors`, in place; they must not be touched before `wait`."""
        if len(self._in_flight) == MAX_IN_FLIGHT:
            self._wait_for_oldest()
        if len(tensors) == 1 and tensors[0].dtype == self.dtype and tensors[0].is_contiguous():
            flat = tensors[0]
        else:
            flat = torch.cat([tensor.reshape(-1).to(self.dtype) for tensor in tensors])
        self._in_flight.append((tensors, flat, self.ranks.all_reduce(flat)))

    def wait(self) -> None:
        """Wait for all buckets that were started."""
        while self._in_flight:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        tensors, flat, wait = self._in_flight.popleft()
        wait()
        if flat is not tensors[0]:
            for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(piece.view_as(tensor))


def make_buckets(sizes: Sequence[int], max_size: int) -> list[list[int]]:
    """Indices of `sizes` in order, in groups whose sum is at most `max_size`; a larger item has a group of its own.

    >>> make_buckets([3, 3, 9, 1, 2], 6)
    [[0, 1], [2], [3, 4]]
    """
    groups: list[list[int]] = []
    space_left = 0
    for index, size in enumerate(sizes):
        if not groups or size > space_left:
            groups.append([])
            space_left = max_size
        groups[-1].append(index)
        space_left -= size
    return groups

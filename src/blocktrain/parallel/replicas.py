"""Keeping replicas equal: averages over the ranks, and a checksum at every switch of block that names who differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from blocktrain.chain.block import Block
from blocktrain.errors import PeerError
from blocktrain.parallel.bucketed_all_reduce import BucketedAllReduce, make_buckets
from blocktrain.parallel.ranks import Ranks

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def batch_norm_statistics(block: Block) -> list[Tensor]:
    """Running means and variances of the block's BatchNorm layers, which each rank updates from its own rows."""
    norms = [part for module in block.modules() for part in module.modules() if isinstance(part, _BatchNorm)]
    found = [statistics for norm in norms for statistics in (norm.running_mean, norm.running_var)]
    return [statistics for statistics in found if statistics is not None]


@torch.no_grad()
def average_over_ranks(
    ranks: Ranks, tensors: Sequence[Tensor], *, dtype: torch.dtype = torch.float32, bucket_bytes: int = 25 * 2**20
) -> None:
    """Replace each tensor by its mean over the ranks, summed in `dtype`. Collective."""
    if ranks.size == 1 or not tensors:
        return
    all_reduce = BucketedAllReduce(ranks, dtype=dtype)
    for bucket in make_buckets([tensor.numel() * dtype.itemsize for tensor in tensors], bucket_bytes):
        for index in bucket:
            tensors[index].div_(ranks.size)
        all_reduce.start([tensors[index] for index in bucket])
    all_reduce.wait()


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> int:
    """64 bits: the sum of each tensor's bit patterns, and these sums in order, by a polynomial.

    It takes one pass over memory. It finds accidents: a flipped bit, another batch, a weight that was never sent.
    """
    total = 0
    for tensor in tensors:
        words = tensor.detach().contiguous().view(_WORDS[tensor.element_size()])
        total = (total * 1_000_003 + int(words.sum(dtype=torch.int64))) % 2**64
    return total


def assert_replicas_equal(ranks: Ranks, block: Block, weights: Mapping[str, Tensor]) -> None:
    """Compare the block's `weights` and buffers over the ranks. Collective: it raises `PeerError` on every rank, naming
    the ranks that differ."""
    if ranks.size == 1:
        return
    buffers = [buffer for module in block.modules() for buffer in module.buffers()]
    local = checksum([*weights.values(), *buffers])
    sums = [(int(high), int(low)) for high, low in ranks.all_gather(divmod(local, 2**32))]
    common, _ = Counter(sums).most_common(1)[0]
    others = [rank for rank, found in enumerate(sums) if found != common]
    if others:
        many = "ranks" if len(others) > 1 else "rank"
        raise PeerError(
            f"the weights of {block} are not the same on every rank: {many} {', '.join(map(str, others))} of "
            f"{ranks.size} drifted from the rest (a faulty device, or another version of the software there?); the "
            "last checkpoint was written before this visit ended and may already contain such weights"
        )

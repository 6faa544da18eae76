"""Do the ranks still have the same weights? A checksum at every switch says so, and who does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from blocktrain.chain.block import Block
from blocktrain.errors import PeerError
from blocktrain.parallel.ranks import Ranks

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> int:
    """64 bits: the sum of each tensor's bit patterns, and these sums in order, by a polynomial.

    One pass over memory. It finds accidents: a flipped bit, another batch, a weight that was never sent.
    """
    total = 0
    for tensor in tensors:
        words = tensor.detach().contiguous().view(_WORDS[tensor.element_size()])
        total = (total * 1_000_003 + int(words.sum(dtype=torch.int64))) % 2**64
    return total


def assert_replicas_equal(ranks: Ranks, block: Block, weights: Mapping[str, Tensor]) -> None:
    """Compare the block's `weights` and buffers over the ranks; raises `PeerError` on all, naming those that differ."""
    if ranks.size == 1:
        return
    buffers = [buffer for module in block.modules() for buffer in module.buffers()]
    mine = checksum([*weights.values(), *buffers])
    sums = [(int(high), int(low)) for high, low in ranks.all_gather(divmod(mine, 2**32))]
    common, _ = Counter(sums).most_common(1)[0]
    others = [rank for rank, found in enumerate(sums) if found != common]
    if others:
        many = "ranks" if len(others) > 1 else "rank"
        raise PeerError(
            f"the weights of {block} are not the same on every rank: {many} {', '.join(map(str, others))} of "
            f"{ranks.size} drifted from the rest (a faulty device, or another version of the software there?); the "
            "last checkpoint was written before this visit ended and may hold some of it"
        )

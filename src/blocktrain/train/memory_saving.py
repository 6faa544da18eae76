"""What a run does for memory while it trains, as `[memory]` says: the one place where those parts meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from blocktrain.chain.block import Partition
from blocktrain.chain.checkpointing import checkpointing
from blocktrain.modules.chunked_loss import chunked_loss
from blocktrain.train.config import MemoryConfig


@contextmanager
def saving_memory(partition: Partition, config: MemoryConfig) -> Iterator[None]:
    """Inside, the partition's model trains and evaluates as `config` says. Its kernels are not part of this: they
    stay (see `modules/kernels.py`)."""
    with ExitStack() as stack:
        if config.checkpointing == "layers":
            stack.enter_context(checkpointing(partition, boundaries=config.boundaries))
        if config.loss_chunk is not None:
            stack.enter_context(chunked_loss(partition.model, config.loss_chunk))
        yield

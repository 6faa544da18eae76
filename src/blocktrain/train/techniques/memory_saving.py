"""`[memory]`: activation checkpointing and a chunked loss, around the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from blocktrain.chain.block import Partition
from blocktrain.chain.checkpointing import checkpointing
from blocktrain.modules.chunked_loss import chunked_loss
from blocktrain.records.run_records import Opening
from blocktrain.train.config import MemoryConfig
from blocktrain.train.context import TrainingContext
from blocktrain.train.technique import Technique


@contextmanager
def saving_memory(partition: Partition, config: MemoryConfig) -> Iterator[None]:
    """Inside, the partition's model trains and evaluates as `config` says."""
    with ExitStack() as stack:
        if config.checkpointing == "layers":
            stack.enter_context(checkpointing(partition, boundaries=config.boundaries))
        if config.loss_chunk is not None:
            stack.enter_context(chunked_loss(partition.model, config.loss_chunk))
        yield


class MemorySaving(Technique):
    """`saving_memory` around the run."""

    def __init__(self, partition: Partition, config: MemoryConfig):
        self._partition = partition
        self._config = config

    def around_run(self) -> AbstractContextManager[object]:
        """See `Technique`."""
        return saving_memory(self._partition, self._config)


def build(context: TrainingContext, opening: Opening, folder: Path) -> MemorySaving:
    """Every run has it; its context does nothing where nothing is configured."""
    return MemorySaving(context.partition, context.config.memory)

"""Full-parameter training of language models by block coordinate descent.

    partition = bt.partition(model, num_blocks=3)
    optimizer = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-4)
    schedule = bt.Cyclic(sweeps=3, visit=bt.Duration.steps(100))
    for visit in schedule.visits(partition):
        with optimizer.visit(visit.block):
            for batch in batches(visit):
                loss = model(**batch).loss
                loss.backward(); optimizer.step(); optimizer.zero_grad()

Names are imported when first used, so that `import blocktrain` costs nothing and `blocktrain --help` answers at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blocktrain.blocks.block import Block, Partition
    from blocktrain.blocks.checkpointing import checkpointing
    from blocktrain.blocks.partition import partition
    from blocktrain.errors import BlocktrainError
    from blocktrain.model.loss import chunked_loss
    from blocktrain.model.resnet import resnet
    from blocktrain.optim.block_optimizer import BlockOptimizer
    from blocktrain.optim.precision import BF16, BF16_EXACT, FP32, INT8, NF4, Precision
    from blocktrain.optim.resting import OnDevice, OnHost
    from blocktrain.optim.state import Drop, KeepOnDisk, KeepOnHost
    from blocktrain.optim.tail import Tail
    from blocktrain.schedule import Cyclic, Visit
    from blocktrain.stopping import FullLength, Plateau, RunLimit
    from blocktrain.train.config import RunConfig
    from blocktrain.train.session import resume, run
    from blocktrain.units import Duration

__version__ = "0.1.0.dev0"

_HOME = {
    "BF16": "optim.precision",
    "BF16_EXACT": "optim.precision",
    "Block": "blocks.block",
    "BlockOptimizer": "optim.block_optimizer",
    "BlocktrainError": "errors",
    "Cyclic": "schedule",
    "Drop": "optim.state",
    "Duration": "units",
    "FP32": "optim.precision",
    "FullLength": "stopping",
    "INT8": "optim.precision",
    "KeepOnDisk": "optim.state",
    "KeepOnHost": "optim.state",
    "NF4": "optim.precision",
    "OnDevice": "optim.resting",
    "OnHost": "optim.resting",
    "Partition": "blocks.block",
    "Plateau": "stopping",
    "Precision": "optim.precision",
    "RunConfig": "train.config",
    "RunLimit": "stopping",
    "Tail": "optim.tail",
    "Visit": "schedule",
    "checkpointing": "blocks.checkpointing",
    "chunked_loss": "model.loss",
    "partition": "blocks.partition",
    "resnet": "model.resnet",
    "resume": "train.session",
    "run": "train.session",
}

__all__ = [
    "BF16",
    "BF16_EXACT",
    "FP32",
    "INT8",
    "NF4",
    "Block",
    "BlockOptimizer",
    "BlocktrainError",
    "Cyclic",
    "Drop",
    "Duration",
    "FullLength",
    "KeepOnDisk",
    "KeepOnHost",
    "OnDevice",
    "OnHost",
    "Partition",
    "Plateau",
    "Precision",
    "RunConfig",
    "RunLimit",
    "Tail",
    "Visit",
    "checkpointing",
    "chunked_loss",
    "partition",
    "resnet",
    "resume",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'blocktrain' has no attribute '{name}'")
    return getattr(importlib.import_module(f"blocktrain.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])

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
    from blocktrain.chain.block import Block, Partition
    from blocktrain.chain.checkpointing import checkpointing
    from blocktrain.chain.partition import partition
    from blocktrain.chain.resnet import resnet
    from blocktrain.contrib.learning_tail import Tail
    from blocktrain.errors import BlocktrainError
    from blocktrain.modules.chunked_loss import chunked_loss
    from blocktrain.optim.block_optimizer import BlockOptimizer
    from blocktrain.optim.precision import BF16, BF16_EXACT, FP32, INT8, NF4, Precision
    from blocktrain.optim.state_store import Drop, KeepOnDisk, KeepOnHost
    from blocktrain.optim.weight_store import OnDevice, OnHost
    from blocktrain.schedule import Cyclic, Visit
    from blocktrain.stopping import FullLength, Plateau, RunLimit
    from blocktrain.train.config import RunConfig
    from blocktrain.train.run import resume, run
    from blocktrain.units import Duration

__version__ = "0.1.0.dev0"

_HOME = {
    "BF16": "optim.precision",
    "BF16_EXACT": "optim.precision",
    "Block": "chain.block",
    "BlockOptimizer": "optim.block_optimizer",
    "BlocktrainError": "errors",
    "Cyclic": "schedule",
    "Drop": "optim.state_store",
    "Duration": "units",
    "FP32": "optim.precision",
    "FullLength": "stopping",
    "INT8": "optim.precision",
    "KeepOnDisk": "optim.state_store",
    "KeepOnHost": "optim.state_store",
    "NF4": "optim.precision",
    "OnDevice": "optim.weight_store",
    "OnHost": "optim.weight_store",
    "Partition": "chain.block",
    "Plateau": "stopping",
    "Precision": "optim.precision",
    "RunConfig": "train.config",
    "RunLimit": "stopping",
    "Tail": "contrib.learning_tail",
    "Visit": "schedule",
    "checkpointing": "chain.checkpointing",
    "chunked_loss": "modules.chunked_loss",
    "partition": "chain.partition",
    "resnet": "chain.resnet",
    "resume": "train.run",
    "run": "train.run",
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

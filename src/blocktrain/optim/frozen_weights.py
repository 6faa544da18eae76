"""The weights of frozen blocks: in which format, where, and with what makes their masters exact.

construct   lower every weight to the compute dtype, keep the low_bits, put the matrices to rest
activate    wake the block; its masters are the weights and the low_bits
retire      keep the new low_bits, put the block to rest again
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blocktrain.chain.block import Block, Partition
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.optim.master import LowBits, Masters, lower
from blocktrain.optim.offloaded_weights import FrozenPlace, OffloadedWeights
from blocktrain.optim.precision import Precision


class FrozenWeights:
    """What a partition's blocks are while they are not trained. Constructing lowers and rests the whole model."""

    def __init__(self, partition: Partition, precision: Precision, place: FrozenPlace):
        _require_dtype(partition, precision)
        self.precision = precision
        self._partition = partition
        self._low_bits: list[LowBits] = [{} for _ in partition]  # of blocks that are frozen, by index
        self._offloaded = OffloadedWeights(partition.chain, precision.frozen, place)
        for name, parameter in partition.whole.parameters.items():  # one by one: packed before the next is lowered
            left = lower({name: parameter}) if precision.has_master else {}
            if precision.keeps_low_bits:
                for block in partition:
                    if name in block.parameters:
                        self._low_bits[block.index][name] = block.part(name, left[name])
            self._offloaded.offload([parameter])

    def activate(self, block: Block) -> Masters | None:
        """Wake a block for training; its masters, where the precision has them."""
        self._offloaded.materialize(block.parameters.values())
        needed = self.precision.has_master or block.rows
        kept = {name: left for index in block.members for name, left in self._low_bits[index].items()}
        return Masters(block, kept) if needed else None

    def retire(self, block: Block, masters: Masters | None) -> None:
        """Keep what a block has become."""
        if masters is not None:
            for index in block.members:
                mine = self._partition[index].parameters
                self._low_bits[index] = masters.low_bits(mine) if self.precision.keeps_low_bits else {}
            masters.close()

    def offload(self, block: Block) -> None:
        """Put a block that has retired to rest; when its masters and moments are gone, so that memory stays low."""
        self._offloaded.offload(block.parameters.values())

    def weights(self, block: Block) -> dict[str, Tensor]:
        """A block's weights in the compute dtype, on the host, not to be changed; nothing is materialized for it."""
        return {name: block.part(name, self._offloaded.value(p)) for name, p in block.parameters.items()}

    def load_weights(self, block: Block, weights: Mapping[str, Tensor]) -> None:
        """Replace a block's weights; raises `CheckpointError` where one is missing."""
        for name, parameter in block.parameters.items():
            shape = block.part(name, parameter).shape
            if name not in weights or weights[name].shape != shape:
                raise CheckpointError(f"the weights to load have no '{name}' of shape {tuple(shape)}")
        for name, parameter in block.parameters.items():
            value = weights[name]
            if name in block.rows:
                value = self._offloaded.value(parameter).clone()
                block.part(name, value).copy_(weights[name])
            self._offloaded.replace(parameter, value)

    def copy(self, sources: Mapping[str, str]) -> None:
        """Give weights (keys) the values that others (values) have in the compute dtype."""
        known = self._partition.whole.parameters
        for name, source in sources.items():
            self._offloaded.replace(known[name], self._offloaded.value(known[source]))
        for low_bits in self._low_bits:
            for name in low_bits.keys() & sources.keys():
                low_bits[name] = torch.zeros_like(low_bits[name])

    def low_bits(self, block: Block) -> LowBits:
        """What a frozen block's weights leave out of its masters."""
        return self._low_bits[block.index]

    def load_low_bits(self, low_bits: list[LowBits]) -> None:
        """Replace all of them."""
        self._low_bits = low_bits

    def tensors(self) -> dict[str, list[Tensor]]:
        """What holds the weights that are away, as they rest on the device ("frozen") or not ("host"), and the
        low_bits."""
        kept = [tensor for low_bits in self._low_bits for tensor in low_bits.values()]
        resting = self._offloaded.tensors()
        return {"frozen": resting["frozen"], "host": [*kept, *resting["host"]]}

    def device_bytes(self, active: Block) -> int:
        """Of the model's weights while `active` is trained: its own in the compute dtype, the others as they rest."""
        awake = {id(parameter) for parameter in active.parameters.values()}
        return sum(
            parameter.nbytes if id(parameter) in awake else self._offloaded.device_bytes(parameter)
            for parameter in self._partition.model.parameters()
        )

    def close(self) -> None:
        """Wake everything, for good."""
        self._offloaded.close()


def _require_dtype(partition: Partition, precision: Precision) -> None:
    """Weights of 16 bits without a master lose small updates; nobody should train so without having said so."""
    for name, parameter in partition.model.named_parameters():
        if not precision.has_master and parameter.dtype in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"'{name}' is {str(parameter.dtype).removeprefix('torch.')}, and precision '{precision.name}' keeps no "
                "fp32 master of it: give precision=BF16_EXACT, or model.float() first"
            )

"""The weights of frozen blocks: their format, their place, and the low bits that make their masters exact.

construct   lower every weight to the compute dtype, keep the low bits, offload the matrices
activate    materialize the block; its masters are its weights joined with the low bits
retire      keep the new low bits, offload the block again
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
    """The weights of a partition's blocks while they are frozen. Constructing lowers and offloads the whole model."""

    def __init__(self, partition: Partition, precision: Precision, place: FrozenPlace):
        _require_dtype(partition, precision)
        self.precision = precision
        self._partition = partition
        self._low_bits: list[LowBits] = [{} for _ in partition]  # of the frozen blocks, by index
        self._offloaded = OffloadedWeights(partition.chain, precision.frozen, place)
        for name, parameter in partition.whole.parameters.items():  # each is offloaded before the next is lowered
            low_bits = lower({name: parameter}) if precision.has_master else {}
            if precision.keeps_low_bits:
                for block in partition:
                    if name in block.parameters:
                        self._low_bits[block.index][name] = block.part(name, low_bits[name])
            self._offloaded.offload([parameter])

    def activate(self, block: Block) -> Masters | None:
        """Materialize a block for training. Returns its masters, if it needs any."""
        self._offloaded.materialize(block.parameters.values())
        needed = self.precision.has_master or block.rows
        low_bits = {name: bits for index in block.members for name, bits in self._low_bits[index].items()}
        return Masters(block, low_bits) if needed else None

    def retire(self, block: Block, masters: Masters | None) -> None:
        """Keep the low bits of a block's masters."""
        if masters is not None:
            for index in block.members:
                mine = self._partition[index].parameters
                self._low_bits[index] = masters.low_bits(mine) if self.precision.keeps_low_bits else {}
            masters.close()

    def offload(self, block: Block) -> None:
        """Offload a block that has retired. Call it when masters and moments are freed, to keep the peak low."""
        self._offloaded.offload(block.parameters.values())

    def weights(self, block: Block) -> dict[str, Tensor]:
        """A block's weights in the compute dtype, on the host; must not be changed. Materializes nothing."""
        return {name: block.part(name, self._offloaded.value(p)) for name, p in block.parameters.items()}

    def load_weights(self, block: Block, weights: Mapping[str, Tensor]) -> None:
        """Replace a block's weights; raises `CheckpointError` if one is missing."""
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
        """Replace the low bits of all blocks."""
        self._low_bits = low_bits

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors that hold offloaded weights, on the device ("frozen") or on the "host" with all low bits."""
        low_bits = [tensor for of_block in self._low_bits for tensor in of_block.values()]
        offloaded = self._offloaded.tensors()
        return {"frozen": offloaded["frozen"], "host": [*low_bits, *offloaded["host"]]}

    def device_bytes(self, active: Block) -> int:
        """Device memory of the model's weights while `active` is trained: its own weights in the compute dtype, the
        others as they are offloaded."""
        materialized = {id(parameter) for parameter in active.parameters.values()}
        return sum(
            parameter.nbytes if id(parameter) in materialized else self._offloaded.device_bytes(parameter)
            for parameter in self._partition.model.parameters()
        )

    def close(self) -> None:
        """Materialize everything, for good."""
        self._offloaded.close()


def _require_dtype(partition: Partition, precision: Precision) -> None:
    """Weights of 16 bits without a master lose small updates; nobody should train so without having asked for it."""
    for name, parameter in partition.model.named_parameters():
        if not precision.has_master and parameter.dtype in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"'{name}' is {str(parameter.dtype).removeprefix('torch.')}, and precision '{precision.name}' keeps no "
                "fp32 master of it: give precision=BF16_EXACT, or model.float() first"
            )

"""Takes a block's weights from frozen (in low precision) to active (with fp32 masters) and back.

construct   lower every weight to the compute dtype, keep the low bits, store the matrices (see `weight_store.py`), move
            the others to the device: one weight after the other, so a model on the host is never whole on the device
activate    restore the block's matrices; its masters are its weights joined with the low bits
retire      keep the new low bits, then store the matrices again
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from blocktrain.chain.block import Block, Partition
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.modules.int8_linear import Int8Layers
from blocktrain.optim.master import LowBits, Masters, lower
from blocktrain.optim.precision import Precision
from blocktrain.optim.weight_store import WeightLocation, WeightStore


class BlockWeights:
    """The weights of a partition's blocks. Constructing lowers and stores those of the whole model, parameters that no
    block may train included.

    device: where the model computes; None leaves every weight and buffer where it is.

    low_bits: by block, the bits of its masters that its weights lack while it is frozen.
    int8: the linear layers that compute in int8 while they are frozen; None: all compute exactly.
    """

    def __init__(
        self,
        partition: Partition,
        precision: Precision,
        location: WeightLocation,
        device: torch.device | None = None,
        int8: Int8Layers | None = None,
    ):
        for name, parameter in partition.whole.parameters.items():
            # 16 bits without a master lose small updates; nobody should train so without having asked for it.
            if not precision.has_master and parameter.dtype in (torch.bfloat16, torch.float16):
                raise ConfigError(
                    f"'{name}' is {str(parameter.dtype).removeprefix('torch.')}, and precision '{precision.name}' "
                    "keeps no fp32 master of it: give precision=BF16_EXACT, or model.float() first"
                )
        self.low_bits: list[LowBits] = [{} for _ in partition]
        self._precision = precision
        self._partition = partition
        self._int8 = int8
        self._store = WeightStore(partition.chain, precision.frozen, location, device, int8)
        self._device = device
        for name, parameter in partition.whole.parameters.items():  # each is stored before the next is lowered
            low_bits = lower(parameter) if precision.has_master else None
            if low_bits is not None and precision.keeps_low_bits:
                for block in partition:
                    if name in block.parameters:
                        self.low_bits[block.index][name] = block.part(name, low_bits)
            self._store_or_move(parameter)
        for parameter in partition.chain.untrained_parameters.values():  # they only have to fit what runs beside them
            if parameter.is_floating_point() and precision.has_master:
                lower(parameter)
            self._store_or_move(parameter)
        for module in partition.model.modules() if device is not None else ():
            module._buffers.update({k: b.to(device) for k, b in module._buffers.items() if b is not None})

    def _store_or_move(self, parameter: nn.Parameter) -> None:
        if parameter.is_floating_point():
            self._store.store([parameter])
        if self._device is not None and parameter.device != self._device:
            parameter.data = parameter.data.to(self._device)

    def activate(self, block: Block) -> Masters | None:
        """Restore a block's weights for training. Returns its masters, if it needs any."""
        self._store.restore(block.parameters.values())
        if self._int8 is not None:
            self._int8.activate(block.modules(), block.parameters.values())
        if not self._precision.has_master and not block.rows:
            return None
        return Masters(block, {name: bits for index in block.members for name, bits in self.low_bits[index].items()})

    def retire(self, block: Block, masters: Masters | None) -> None:
        """Keep the low bits of a block's masters."""
        if self._int8 is not None:
            self._int8.retire()
        if masters is not None:
            for index in block.members:
                mine = self._partition[index].parameters
                self.low_bits[index] = masters.low_bits(mine) if self._precision.keeps_low_bits else {}
            masters.close()

    def store(self, block: Block) -> None:
        """Store a block that has retired. Call it when masters and moments are freed, to keep the peak low."""
        self._store.store(block.parameters.values())

    def weights(self, block: Block) -> dict[str, Tensor]:
        """A block's weights in the compute dtype, on the host; must not be changed. Restores nothing."""
        return {name: block.part(name, self._store.value(p)) for name, p in block.parameters.items()}

    def load_weights(self, block: Block, weights: Mapping[str, Tensor]) -> None:
        """Replace a block's weights; raises `CheckpointError` if one is missing."""
        for name, parameter in block.parameters.items():
            shape = block.part(name, torch.empty_like(parameter, device="meta")).shape
            if name not in weights or weights[name].shape != shape:
                raise CheckpointError(f"the weights to load have no '{name}' of shape {tuple(shape)}")
        for name, parameter in block.parameters.items():
            value = weights[name]
            if name in block.rows:
                value = self._store.value(parameter).clone()
                block.part(name, value).copy_(weights[name])
            self._store.replace(parameter, value)

    def copy(self, sources: Mapping[str, str]) -> None:
        """Give weights (keys) the values that others (values) have in the compute dtype."""
        known = self._partition.whole.parameters
        for name, source in sources.items():
            self._store.replace(known[name], self._store.value(known[source]))
        for low_bits in self.low_bits:
            for name in low_bits.keys() & sources.keys():
                low_bits[name] = torch.zeros_like(low_bits[name])

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors that hold stored weights, on the device ("frozen") or on the "host" with all low bits."""
        low_bits = [tensor for of_block in self.low_bits for tensor in of_block.values()]
        stored = self._store.tensors()
        copies = [] if self._int8 is None else [part for weight in self._int8.weights.values() for part in weight.parts]
        return {"frozen": [*stored["frozen"], *copies], "host": [*low_bits, *stored["host"]]}

    def device_bytes(self, active: Block) -> int:
        """Device memory of the model's weights while `active` is trained: its own weights in the compute dtype, the
        others as they are stored, and the copies that compute in int8."""
        trained = {id(parameter) for parameter in active.parameters.values()}
        copies_are_stored = self._precision.frozen == "int8"
        total = 0
        for parameter in self._partition.model.parameters():
            total += parameter.nbytes if id(parameter) in trained else self._store.device_bytes(parameter)
            if self._int8 is not None and id(parameter) not in trained and not copies_are_stored:
                total += self._int8.nbytes(parameter)
        return total

    def close(self) -> None:
        """Restore everything, for good."""
        self._store.close()
        if self._int8 is not None:
            self._int8.close()

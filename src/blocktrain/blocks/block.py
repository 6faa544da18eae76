"""Blocks and partitions: which parameters are trained together. Plain data, resolved once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from blocktrain.model.chain import Chain, Layer


@dataclass(frozen=True, eq=False)
class Block:
    """A set of layers trained together (the paper's *submodel*).

    `parameters` maps full names to the parameters this block owns; a tied parameter is owned by the first block
    that uses it, so the same tensor never appears in two blocks.
    """

    index: int
    layers: tuple[Layer, ...]
    parameters: Mapping[str, nn.Parameter]

    @property
    def num_parameters(self) -> int:
        """Scalars owned by this block."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def modules(self) -> Iterator[nn.Module]:
        """The top modules of the block's layers, in forward order."""
        for layer in self.layers:
            yield from layer.modules.values()

    def __repr__(self) -> str:
        first, last = self.layers[0].name, self.layers[-1].name
        span = first if first == last else f"{first} .. {last}"
        return f"Block({self.index}: {span}, {self.num_parameters:,} parameters)"


@dataclass(frozen=True, eq=False)
class Partition(Sequence[Block]):
    """The ordered blocks of a chain; every parameter of the model is in exactly one of them."""

    chain: Chain
    blocks: tuple[Block, ...]

    @property
    def model(self) -> nn.Module:
        """The model that was partitioned."""
        return self.chain.model

    @property
    def num_parameters(self) -> int:
        """Scalars in all blocks; tied ones counted once."""
        return sum(block.num_parameters for block in self.blocks)

    @property
    def whole(self) -> Block:
        """All blocks as one: what full-parameter training has active."""
        parameters = {name: parameter for block in self.blocks for name, parameter in block.parameters.items()}
        return Block(0, self.chain.layers, parameters)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride] - int or slice, as in Sequence
        return self.blocks[index]

    def __len__(self) -> int:
        return len(self.blocks)

    def __repr__(self) -> str:
        return "Partition(\n" + "".join(f"  {block}\n" for block in self.blocks) + ")"

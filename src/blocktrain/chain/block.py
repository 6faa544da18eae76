"""Blocks and partitions: which parameters are trained together. Plain data, resolved once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from blocktrain.chain.chain import Chain, Layer
from blocktrain.errors import PartitionError


@dataclass(frozen=True, eq=False)
class Block:
    """A set of layers trained together (the paper's *submodel*).

    `parameters` maps full names to the parameters this block owns; a tied parameter is owned by the first block
    that uses it. No scalar is in two blocks: of a parameter that is in `rows` this block owns those rows only (along
    the first dimension), and other blocks the rest. `layers` are all that it owns something of, `pieces` the names of
    its parts where it was cut inside a layer. `index` is its place in the partition, from 0 on.

    A visit may train several adjacent blocks of a partition as one (`Partition.union`). Such a block has the index of
    the lowest of them and names them in `united`; what is kept of it between visits is kept for each of its `members`.
    """

    index: int
    layers: tuple[Layer, ...]
    parameters: Mapping[str, nn.Parameter]
    rows: Mapping[str, range] = field(default_factory=dict)
    pieces: tuple[str, ...] = ()  # names of what it is made of, in forward order; () are its layers
    united: tuple[int, ...] = ()  # indices of the partition's blocks that it is made of; () is itself

    @property
    def num_parameters(self) -> int:
        """Scalars owned by this block."""
        return sum(self.numel(name) for name in self.parameters)

    def numel(self, name: str) -> int:
        """Scalars that this block owns of its parameter `name`."""
        parameter = self.parameters[name]
        rows = self.rows.get(name)
        return parameter.numel() if rows is None else parameter.numel() // parameter.shape[0] * len(rows)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """Of a tensor shaped like parameter `name`, what belongs to this block: a view of its rows, or all of it."""
        rows = self.rows.get(name)
        return tensor if rows is None else tensor[rows.start : rows.stop]

    @property
    def members(self) -> tuple[int, ...]:
        """Indices of the partition's blocks that it is made of, in forward order: itself, if it is one of them."""
        return self.united or (self.index,)

    @property
    def names(self) -> tuple[str, ...]:
        """What it is made of, in forward order."""
        return self.pieces or tuple(layer.name for layer in self.layers)

    def modules(self) -> Iterator[nn.Module]:
        """The top modules of the block's layers, in forward order."""
        for layer in self.layers:
            yield from layer.modules.values()

    def __repr__(self) -> str:
        first, last = self.names[0], self.names[-1]
        span = first if first == last else f"{first} .. {last}"
        number = f"{self.members[0]} to {self.members[-1]}" if len(self.members) > 1 else self.index
        return f"Block({number}: {span}, {self.num_parameters:,} parameters)"


@dataclass(frozen=True, eq=False)
class Partition(Sequence[Block]):
    """The ordered blocks of a chain; every scalar of the model's parameters is in exactly one of them."""

    chain: Chain
    blocks: tuple[Block, ...]
    _unions: dict[range, Block] = field(default_factory=dict, init=False, repr=False)
    _shares: list[Block] = field(default_factory=list, init=False, repr=False)

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
        return Block(0, self.chain.layers, parameters, united=tuple(range(len(self))))

    @property
    def undivided(self) -> Partition:
        """The same model in one block."""
        return Partition(self.chain, (replace(self.whole, united=()),))

    def union(self, members: range) -> Block:
        """The blocks `members` as one, trained together; of a single one that block itself, and always the same object.

        Raises `PartitionError` for blocks that own parts of a parameter: their optimizer states cannot be joined.
        """
        if len(members) == 1:
            return self.blocks[members[0]]
        if members not in self._unions:
            self._unions[members] = _united([self.blocks[index] for index in members])
        return self._unions[members]

    def suffix(self, index: int) -> Block:
        """Block `index` and every block above it, as one."""
        return self.union(range(index, len(self)))

    def share(self, index: int, name: str, *, layers: Sequence[Layer], parameters: Collection[str]) -> Block:
        """What one of several processes trains of block `index`: those of its `layers` and of its `parameters` (names)
        that are given."""
        block = self.blocks[index]
        share = replace(
            block,
            layers=tuple(layer for layer in block.layers if layer in layers),
            parameters={key: parameter for key, parameter in block.parameters.items() if key in parameters},
            rows={key: rows for key, rows in block.rows.items() if key in parameters},
            pieces=(name,),
        )
        self._shares.append(share)
        return share

    def above(self, block: Block) -> dict[str, nn.Parameter]:
        """The parameters of every block above `block`."""
        blocks = self.blocks[block.members[-1] + 1 :]
        return {name: parameter for other in blocks for name, parameter in other.parameters.items()}

    def over(self, model: nn.Module) -> Partition:
        """The same division of a copy of the model."""
        groups = {layer.name: list(layer.modules) for layer in self.chain.layers}
        chain = Chain.of_modules(model, groups)
        layers = dict(zip(self.chain.layers, chain.layers, strict=True))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        blocks = [
            replace(
                block,
                layers=tuple(layers[layer] for layer in block.layers),
                parameters={name: parameters[name] for name in block.parameters},
            )
            for block in self.blocks
        ]
        return Partition(chain, tuple(blocks))

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride] - int or slice, as in Sequence
        return self.blocks[index]

    def __contains__(self, block: object) -> bool:
        """Whether `block` is one of the blocks, a union of them or a share of one."""
        return block in self.blocks or block in self._unions.values() or block in self._shares

    def __len__(self) -> int:
        return len(self.blocks)

    def __repr__(self) -> str:
        return "Partition(\n" + "".join(f"  {block}\n" for block in self.blocks) + ")"


def _united(blocks: Sequence[Block]) -> Block:
    for block in blocks:
        if block.rows:
            name, rows = next(iter(block.rows.items()))
            raise PartitionError(
                f"{block} owns rows {rows.start} to {rows.stop} of '{name}' only, so it cannot be trained as one with "
                "others: cut into whole parameters (a larger blocks.largest, or blocks.count), or set "
                "schedule.span = 'block'"
            )
    return Block(
        blocks[0].index,
        layers=tuple(dict.fromkeys(layer for block in blocks for layer in block.layers)),
        parameters={name: parameter for block in blocks for name, parameter in block.parameters.items()},
        pieces=tuple(name for block in blocks for name in block.names),
        united=tuple(block.index for block in blocks),
    )

"""Blocks and partitions: which parameters are trained together. Plain data; nothing here runs a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from blocktrain.chain.chain import Chain, Layer
from blocktrain.errors import PartitionError


@dataclass(frozen=True, eq=False)
class Block:
    """A set of layers trained together (the paper's *submodel*).

    index: its position in the partition, from 0.
    layers: every layer in which this block owns something, in forward order.
    parameters: full name -> parameter that this block owns. The first block that uses a tied parameter owns it.
    rows: the range along the first dimension that this block owns of a parameter, where it does not own all of it.
        Other blocks own the remaining rows, so no scalar is in two blocks.
    segments: names of its parts where it was cut inside a layer; empty where it consists of whole layers.

    A visit may train several adjacent blocks as one (`Partition.union`). Such a union has the index of its lowest block
    and names its blocks in `union_of`; what is kept between visits is kept for each of its `members`.
    """

    index: int
    layers: tuple[Layer, ...]
    parameters: Mapping[str, nn.Parameter]
    rows: Mapping[str, range] = field(default_factory=dict)
    segments: tuple[str, ...] = ()
    union_of: tuple[int, ...] = ()

    @property
    def boundary(self) -> int:
        """The boundary below this block: the index of its first layer in the chain. The layers before it are the
        block's prefix."""
        return self.layers[0].index

    @property
    def num_parameters(self) -> int:
        """How many scalars this block owns."""
        return sum(self.numel(name) for name in self.parameters)

    def numel(self, name: str) -> int:
        """How many scalars of its parameter `name` this block owns."""
        parameter = self.parameters[name]
        rows = self.rows.get(name)
        return parameter.numel() if rows is None else parameter.numel() // parameter.shape[0] * len(rows)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """The part of `tensor`, which is shaped like parameter `name`, that belongs to this block: a view of its rows,
        or the tensor itself."""
        rows = self.rows.get(name)
        return tensor if rows is None else tensor[rows.start : rows.stop]

    @property
    def members(self) -> tuple[int, ...]:
        """Indices of the partition's blocks that this one consists of, in forward order; its own unless it is a
        union."""
        return self.union_of or (self.index,)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its segments or layers, in forward order."""
        return self.segments or tuple(layer.name for layer in self.layers)

    def modules(self) -> Iterator[nn.Module]:
        """The top modules of the block's layers, in forward order."""
        for layer in self.layers:
            yield from layer.modules.values()

    def __repr__(self) -> str:
        first, last = self.names[0], self.names[-1]
        span = first if first == last else f"{first} .. {last}"
        number = f"{self.members[0]} to {self.members[-1]}" if len(self.members) > 1 else self.index
        return f"Block({number}: {span}, {self.num_parameters:,} parameters)"


class Partition(Sequence[Block]):
    """The ordered blocks of a chain; every scalar of the model's parameters is in exactly one of them, but for
    parameters that did not require gradients when the model was cut: they are in none and are never trained.

    The division itself never changes. A partition also remembers the unions (`union`) and the restricted blocks
    (`restrict`) that it has handed out: `block in partition` is true of these too, and a union is always the same
    object.
    """

    def __init__(self, chain: Chain, blocks: Sequence[Block]):
        self.chain = chain
        self.blocks = tuple(blocks)
        self._unions: dict[range, Block] = {}
        self._restricted: list[Block] = []

    @property
    def model(self) -> nn.Module:
        """The model that was partitioned."""
        return self.chain.model

    @property
    def num_parameters(self) -> int:
        """How many scalars all blocks own; tied parameters are counted once."""
        return sum(block.num_parameters for block in self.blocks)

    @property
    def whole(self) -> Block:
        """All blocks as one: what full-parameter training has active."""
        parameters = {name: parameter for block in self.blocks for name, parameter in block.parameters.items()}
        return Block(0, self.chain.layers, parameters, union_of=tuple(range(len(self))))

    @property
    def undivided(self) -> Partition:
        """The same model as a partition of one block."""
        return Partition(self.chain, [replace(self.whole, union_of=())])

    def union(self, members: range) -> Block:
        """The adjacent blocks `members` as one block, trained together; a single member is that block itself.

        Raises `PartitionError` for blocks that own some rows of a parameter only: their optimizer states cannot be
        joined.
        """
        if len(members) == 1:
            return self.blocks[members[0]]
        if members in self._unions:
            return self._unions[members]
        blocks = [self.blocks[index] for index in members]
        for block in blocks:
            if block.rows:
                name, rows = next(iter(block.rows.items()))
                raise PartitionError(
                    f"{block} owns only rows {rows.start} to {rows.stop} of '{name}', so it cannot be trained together "
                    "with other blocks: cut into whole parameters (a larger blocks.largest, or blocks.count), or set "
                    "schedule.span = 'block'"
                )
        self._unions[members] = union = Block(
            blocks[0].index,
            layers=tuple(dict.fromkeys(layer for block in blocks for layer in block.layers)),
            parameters={name: parameter for block in blocks for name, parameter in block.parameters.items()},
            segments=tuple(name for block in blocks for name in block.names),
            union_of=tuple(block.index for block in blocks),
        )
        return union

    def suffix(self, index: int) -> Block:
        """Block `index` and every block above it, as one."""
        return self.union(range(index, len(self)))

    def restrict(self, index: int, name: str, *, layers: Collection[Layer], parameters: Collection[str]) -> Block:
        """Block `index` restricted to some of its `layers` and `parameters` (names): what one of several processes
        trains of it. `name` is what messages call it."""
        block = self.blocks[index]
        restricted = replace(
            block,
            layers=tuple(layer for layer in block.layers if layer in layers),
            parameters={key: parameter for key, parameter in block.parameters.items() if key in parameters},
            rows={key: rows for key, rows in block.rows.items() if key in parameters},
            segments=(name,),
        )
        self._restricted.append(restricted)
        return restricted

    def parameters_above(self, block: Block) -> dict[str, nn.Parameter]:
        """The parameters of every block above `block`, by name."""
        blocks = self.blocks[block.members[-1] + 1 :]
        return {name: parameter for other in blocks for name, parameter in other.parameters.items()}

    def rebind(self, model: nn.Module) -> Partition:
        """The same division of `model`, a copy of this partition's model."""
        groups = {layer.name: [*layer.modules, *layer.direct] for layer in self.chain.layers}
        chain = Chain.of_modules(model, groups, untrained=self.chain.untrained, reads=self.chain.reads)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        blocks = [
            replace(
                block,
                layers=tuple(chain.layers[layer.index] for layer in block.layers),
                parameters={name: parameters[name] for name in block.parameters},
            )
            for block in self.blocks
        ]
        return Partition(chain, blocks)

    def __getitem__(self, index):  # pyright: ignore[reportIncompatibleMethodOverride] - int or slice, as in Sequence
        return self.blocks[index]

    def __contains__(self, block: object) -> bool:
        """Whether `block` is one of the blocks, or a union or a restricted block that this partition handed out."""
        return block in self.blocks or block in self._unions.values() or block in self._restricted

    def __len__(self) -> int:
        return len(self.blocks)

    def __repr__(self) -> str:
        return "Partition(\n" + "".join(f"  {block}\n" for block in self.blocks) + ")"

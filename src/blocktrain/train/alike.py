"""Blocks that are alike: what is measured of the lowest and the highest of them tells those between.

    head         H
    layer 3      |  highest of the alike: measured
    layer 2      |  on the line
    layer 1      |  on the line
    layer 0      |  lowest: measured
    embedding    E

What a step costs with a block active is a constant of its kind and something for each layer above it, which the
backward pass goes through. So a run's opening takes as long for 32 layers as for two of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from blocktrain.blocks.block import Block, Partition

T = TypeVar("T")


def ends(partition: Partition) -> list[Block]:
    """The lowest and the highest block of each kind, in order; the others follow from them (see `filled`)."""
    indices = {index for group in _alike(partition) for index in (group[0], group[-1])}
    return [partition[index] for index in sorted(indices)]


def filled(partition: Partition, known: Mapping[int, T], between: Callable[[T, T, float], T]) -> list[T]:
    """What is `known` of the ends, by index of the block, and for each block between two of them
    `between(low, high, share)`: `share` is how far up it lies, from 0 to 1."""
    result = dict(known)
    for group in _alike(partition):
        low, high = group[0], group[-1]
        bottom, top = _height(partition[low], partition), _height(partition[high], partition)
        for index in (index for index in group if index not in known):
            share = (_height(partition[index], partition) - bottom) / max(top - bottom, 1)
            result[index] = between(known[low], known[high], share)
    return [result[index] for index in range(len(partition))]


def on_the_line(low: float, high: float, share: float) -> int:
    """A whole number between two."""
    return round(low + (high - low) * share)


def _alike(partition: Partition) -> list[list[int]]:
    """Indices of blocks whose parameters have the same shapes and places in layers of the same kind, in order."""
    groups: dict[Any, list[int]] = {}
    for block in partition:
        places = {path: type(module).__name__ for layer in block.layers for path, module in layer.modules.items()}
        kind = []
        for name, parameter in block.parameters.items():
            path = next(path for path in places if name.startswith(f"{path}."))
            shape = (block.numel(name), parameter.shape, parameter.dtype)
            kind.append((places[path], name.removeprefix(path), *shape))
        groups.setdefault((len(block.layers), *kind), []).append(block.index)
    return list(groups.values())


def _height(block: Block, partition: Partition) -> int:
    return partition.chain.layers.index(block.layers[0])

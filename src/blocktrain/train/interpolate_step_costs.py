"""Step costs (FLOPs, bytes) of each block, of which only two in a group of identical blocks have to be measured.

The lowest and the highest block of a group are measured, and those between are interpolated linearly:

    head         H
    layer 3      |  the highest of the identical blocks: measured
    layer 2      |  interpolated
    layer 1      |  interpolated
    layer 0      |  lowest: measured
    embedding    E

With a block active, a step costs a constant that depends on the kind of block, plus something for each layer above it,
because the backward pass goes through that layer. So counting takes as long for 32 layers as for two of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from blocktrain.chain.block import Block

T = TypeVar("T")


def measured_positions(blocks: Sequence[Block]) -> list[int]:
    """Positions of the lowest and the highest block of each kind, in order; `interpolate_missing` finds the others."""
    return sorted({position for group in _alike(blocks) for position in (group[0], group[-1])})


def interpolate_missing(
    blocks: Sequence[Block], known: Mapping[int, T], between: Callable[[T, T, float], T]
) -> list[T]:
    """What is `known` of the ends, by position, and for each block between two of them `between(low, high, share)`:
    `share` is how far up the chain it lies, from 0 to 1."""
    result = dict(known)
    for group in _alike(blocks):
        low, high = group[0], group[-1]
        bottom, top = (blocks[end].boundary for end in (low, high))
        for position in group[1:-1]:
            share = (blocks[position].boundary - bottom) / max(top - bottom, 1)
            result[position] = between(known[low], known[high], share)
    return [result[position] for position in range(len(blocks))]


def interpolate(low: float, high: float, share: float) -> int:
    """A whole number between two."""
    return round(low + (high - low) * share)


def _alike(blocks: Sequence[Block]) -> list[list[int]]:
    """Positions of blocks whose parameters have the same shapes and places in layers of the same kind, in order."""
    groups: dict[Any, list[int]] = {}
    for position, block in enumerate(blocks):
        places = {path: type(module).__name__ for layer in block.layers for path, module in layer.modules.items()}
        kind = []
        for name, parameter in block.parameters.items():
            path = next(path for path in places if name.startswith(f"{path}."))
            shape = (block.numel(name), parameter.shape, parameter.dtype)
            kind.append((places[path], name.removeprefix(path), *shape))
        groups.setdefault((len(block.layers), *kind), []).append(position)
    return list(groups.values())

"""Blocks smaller than a layer: a layer's modules apart, a matrix in ranges of its rows.

Memory is set by the largest block. Whole layers rarely divide evenly: G-5.4B (28 layers) in three blocks of modules has
none above 1.005 of a third, of layers 1.032. And in a model with a large vocabulary the largest is its embedding.
Llama-3-8B with `largest = 180_000_000`:

    embedding    model.embed_tokens.weight                     525 M in 3 ranges of rows
    layers.0     self_attn | mlp and norms                      42 M, 176 M
    head         model.norm | lm_head.weight                   525 M in 3 ranges of rows

A piece says what is trained together, and nothing else: the forward pass, what is stored of a prefix and what is
computed again go by whole layers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from blocktrain.errors import PartitionError

if TYPE_CHECKING:  # the planner cuts shapes in the same way, without PyTorch
    from torch import nn

    from blocktrain.chain.chain import Chain


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Parameters that one layer owns; of a single one only `rows` along its first dimension, where that is given."""

    name: str
    layer: int
    parameters: Mapping[str, nn.Parameter]
    rows: range | None = None

    @property
    def size(self) -> int:
        """Scalars."""
        whole = sum(parameter.numel() for parameter in self.parameters.values())
        if self.rows is None:
            return whole
        (parameter,) = self.parameters.values()
        return whole // parameter.shape[0] * len(self.rows)


def whole_layers(chain: Chain) -> list[Piece]:
    """One piece a layer."""
    return [
        Piece(name=layer.name, layer=index, parameters=chain.owned[index]) for index, layer in enumerate(chain.layers)
    ]


def modules_apart(chain: Chain) -> list[Piece]:
    """One piece for each module that has a matrix, in the order in which layers name them. Vectors (norms) belong to
    the matrix that follows, the last ones of a layer to the one before."""
    return [piece for whole in whole_layers(chain) for piece in _by_module(whole)]


def _by_module(whole: Piece) -> Iterator[Piece]:
    units: list[Piece] = []
    for path, names in groupby(whole.parameters, key=lambda name: name.rpartition(".")[0]):
        mine = {name: whole.parameters[name] for name in names}
        units.append(Piece(name=path, layer=whole.layer, parameters=mine))
    matrices = [place for place, unit in enumerate(units) if any(len(p.shape) > 1 for p in unit.parameters.values())]
    if len(matrices) < 2:
        yield whole
        return
    for start, stop in pairwise([0, *(place + 1 for place in matrices[:-1]), len(units)]):
        yield from _joined(units[start:stop])


def pieces_up_to(chain: Chain, largest: int) -> list[Piece]:
    """Pieces of at most `largest` scalars, in the order of the chain; raises `PartitionError` where one row is larger.

    A layer that is too large is taken apart into its modules, as many of them together as fit.
    """
    if largest < 1:
        raise PartitionError(f"largest must be at least 1 parameter, not {largest}")
    return [piece for whole in whole_layers(chain) for piece in _taken_apart(whole, largest)]


def _taken_apart(whole: Piece, largest: int) -> Iterator[Piece]:
    if whole.size <= largest:
        yield whole
        return
    together: list[Piece] = []
    for unit in _units("", whole, largest):
        if sum(piece.size for piece in [*together, unit]) > largest:
            yield from _joined(together)
            together = []
        if unit.size > largest:
            yield from _ranges_of_rows(unit, largest)
        else:
            together.append(unit)
    yield from _joined(together)


def _units(path: str, whole: Piece, largest: int) -> Iterator[Piece]:
    """The largest modules under `path` that are small enough; single parameters where there is none."""
    if whole.size <= largest or len(whole.parameters) == 1:
        name = path.removesuffix(".") if len(whole.parameters) > 1 else next(iter(whole.parameters))
        yield Piece(name=name, layer=whole.layer, parameters=whole.parameters)
        return

    def child(name: str) -> str:
        return name.removeprefix(path).split(".")[0]

    for first, names in groupby(whole.parameters, key=child):
        part = Piece(name="", layer=whole.layer, parameters={name: whole.parameters[name] for name in names})
        yield from _units(f"{path}{first}.", part, largest)


def _joined(units: list[Piece]) -> Iterator[Piece]:
    """Small units as one piece; none is none."""
    if units:
        parameters = {name: p for unit in units for name, p in unit.parameters.items()}
        yield Piece(name=_name_of([unit.name for unit in units]), layer=units[0].layer, parameters=parameters)


def _ranges_of_rows(unit: Piece, largest: int) -> Iterator[Piece]:
    ((name, parameter),) = unit.parameters.items()
    rows, width = parameter.shape[0], parameter.numel() // parameter.shape[0]
    if width > largest:
        raise PartitionError(
            f"largest = {largest}, but a row of '{name}' has {width} parameters; allow at least that many"
        )
    count = -(-rows // (largest // width))
    for index in range(count):
        part = range(rows * index // count, rows * (index + 1) // count)
        yield Piece(name=f"{name}[{part.start}:{part.stop}]", layer=unit.layer, parameters=unit.parameters, rows=part)


def _name_of(names: list[str]) -> str:
    """`a.b.c` and `a.b.d` are `a.b.(c+d)`."""
    if len(names) == 1:
        return names[0]
    stem = os.path.commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
    ends = "+".join(name.removeprefix(f"{stem}.") for name in names)
    return f"{stem}.({ends})" if stem else ends

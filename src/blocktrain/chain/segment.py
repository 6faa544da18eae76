"""Segments of layers: what a block is made of where whole layers are too coarse.

Memory is set by the largest block, and whole layers rarely divide evenly: the largest of three blocks of G-5.4B (28
layers) has 1.032 of a third of the parameters if it consists of layers, 1.005 if it consists of modules. In a model
with a large vocabulary the largest layer is the embedding. Llama-3-8B with `largest = 180_000_000`:

    embedding    model.embed_tokens.weight                     525 M in 3 ranges of rows
    layers.0     self_attn | mlp and norms                      42 M, 176 M
    head         model.norm | lm_head.weight                   525 M in 3 ranges of rows

A segment decides only what is trained together. The forward pass, the prefix cache and activation checkpointing work
on whole layers.
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
class Segment:
    """Parameters that one layer owns and that are trained together.

    layer: the index of that layer in the chain.
    rows: a range along the first dimension of its only parameter, where the segment has some rows of it; None where it
        has all.
    """

    name: str
    layer: int
    parameters: Mapping[str, nn.Parameter]
    rows: range | None = None

    @property
    def size(self) -> int:
        """How many scalars it has."""
        numel = sum(parameter.numel() for parameter in self.parameters.values())
        if self.rows is None:
            return numel
        (parameter,) = self.parameters.values()
        return numel // parameter.shape[0] * len(self.rows)


def layer_segments(chain: Chain) -> list[Segment]:
    """One segment for each layer."""
    return [
        Segment(name=layer.name, layer=index, parameters=chain.owned[index]) for index, layer in enumerate(chain.layers)
    ]


def module_segments(chain: Chain) -> list[Segment]:
    """One segment for each module that has a matrix, in the order in which layers name them. Vectors (norms) belong to
    the matrix that follows them, the last vectors of a layer to the matrix before them."""
    segments: list[Segment] = []
    for layer in layer_segments(chain):
        modules: list[Segment] = []
        for path, names in groupby(layer.parameters, key=lambda name: name.rpartition(".")[0]):
            parameters = {name: layer.parameters[name] for name in names}
            modules.append(Segment(name=path, layer=layer.layer, parameters=parameters))
        matrices = [i for i, module in enumerate(modules) if any(len(p.shape) > 1 for p in module.parameters.values())]
        if len(matrices) < 2:
            segments.append(layer)
            continue
        for start, stop in pairwise([0, *(index + 1 for index in matrices[:-1]), len(modules)]):
            segments.append(_joined(modules[start:stop]))
    return segments


def segments_up_to(chain: Chain, largest: int) -> list[Segment]:
    """Segments of at most `largest` scalars, in the order of the chain.

    A layer that is too large is split into its modules, of which as many as fit stay together; a matrix that is too
    large is split into ranges of rows. Raises `PartitionError` where a single row is larger than that.
    """
    if largest < 1:
        raise PartitionError(f"largest must be at least 1 parameter, not {largest}")
    segments: list[Segment] = []
    for layer in layer_segments(chain):
        if layer.size <= largest:
            segments.append(layer)
            continue
        together: list[Segment] = []
        for unit in _units("", layer, largest):
            if together and sum(segment.size for segment in [*together, unit]) > largest:
                segments.append(_joined(together))
                together = []
            if unit.size > largest:
                segments += _ranges_of_rows(unit, largest)
            else:
                together.append(unit)
        if together:
            segments.append(_joined(together))
    return segments


def _units(path: str, segment: Segment, largest: int) -> Iterator[Segment]:
    """The largest modules under `path` that are small enough; single parameters where no module is."""
    if segment.size <= largest or len(segment.parameters) == 1:
        name = path.removesuffix(".") if len(segment.parameters) > 1 else next(iter(segment.parameters))
        yield Segment(name=name, layer=segment.layer, parameters=segment.parameters)
        return

    def child(name: str) -> str:
        return name.removeprefix(path).split(".")[0]

    for first, names in groupby(segment.parameters, key=child):
        parameters = {name: segment.parameters[name] for name in names}
        yield from _units(f"{path}{first}.", Segment(name="", layer=segment.layer, parameters=parameters), largest)


def _joined(units: list[Segment]) -> Segment:
    """Adjacent segments of one layer as one; `a.b.c` and `a.b.d` are then called `a.b.(c+d)`."""
    names = [unit.name for unit in units]
    if len(names) == 1:
        name = names[0]
    else:
        stem = os.path.commonpath([each.replace(".", "/") for each in names]).replace("/", ".")
        ends = "+".join(each.removeprefix(f"{stem}.") for each in names)
        name = f"{stem}.({ends})" if stem else ends
    parameters = {key: parameter for unit in units for key, parameter in unit.parameters.items()}
    return Segment(name=name, layer=units[0].layer, parameters=parameters)


def _ranges_of_rows(unit: Segment, largest: int) -> Iterator[Segment]:
    ((name, parameter),) = unit.parameters.items()
    rows, width = parameter.shape[0], parameter.numel() // parameter.shape[0]
    if width > largest:
        raise PartitionError(
            f"largest = {largest}, but one row of '{name}' has {width} parameters; allow at least that many"
        )
    count = -(-rows // (largest // width))
    for index in range(count):
        part = range(rows * index // count, rows * (index + 1) // count)
        yield Segment(name=f"{name}[{part.start}:{part.stop}]", layer=unit.layer, parameters=unit.parameters, rows=part)

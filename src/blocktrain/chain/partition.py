"""`partition(model, num_blocks=M)`: from a model to its blocks (paper Algorithm 1, line 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from blocktrain.chain.balance import balanced, balanced_up_to
from blocktrain.chain.block import Block, Partition
from blocktrain.chain.chain import Chain
from blocktrain.chain.cost import layer_costs
from blocktrain.chain.find import find_chain
from blocktrain.chain.piece import Piece, modules_apart, pieces_up_to, whole_layers
from blocktrain.errors import ConfigError, PartitionError, nearest

Balance = Literal["parameters", "flops"]
Pieces = Literal["layers", "modules"]


def partition(
    model: nn.Module,
    num_blocks: int | None = None,
    *,
    stages: int = 1,
    pieces: Pieces = "layers",
    largest: int | None = None,
    balance: Balance = "parameters",
    patterns: Sequence[Sequence[str]] | None = None,
    layers: Mapping[str, Sequence[str]] | None = None,
    batch: Mapping[str, Any] | None = None,
) -> Partition:
    """Cut `model` into blocks: contiguous unless `stages` says otherwise, of whole layers unless `pieces` or `largest`
    does.

    model: a Hugging Face causal LM, an `nn.Sequential`, `blocktrain.resnet(...)`, or any module whose `layers`
        are given as `{layer name: [dotted module paths]}` in forward order.
    num_blocks: how many blocks (M); 1 is ordinary full-parameter training.
    stages: of a pipeline (P). The chain is cut into P x M pieces, and block k has the k-th piece of every stage (the
        paper's Figure 2): each process always trains a piece and has the others frozen. 1: contiguous blocks.
    pieces: what those blocks are made of: whole `"layers"`, or their `"modules"`, each matrix apart, so that a few
        blocks have more nearly equal parameters (see `piece.py`).
    balance: divide so that blocks have nearly equal `"parameters"` (memory) or `"flops"` (counted forward FLOPs of
        `batch`, the keyword arguments of one forward call).
    largest: instead of `num_blocks`, the most scalars that a block may own; as few blocks as that allows. A larger
        layer is taken apart into its modules, and a larger matrix into ranges of rows (see `piece.py`).
    patterns: instead of `num_blocks`, one list of shell patterns a block over layer names, matched against the
        whole name: `[["embedding", "transformer.h.[0-3]"], ["transformer.h.*", "head"]]`. A layer goes to the
        first block that names it; a block must be contiguous, and a pattern that matches nothing is an error.

    Raises `PartitionError` when the model cannot be cut so, `ConfigError` for contradictory arguments.
    """
    chain = find_chain(model, layers)
    if [num_blocks, largest, patterns].count(None) != 2:
        raise ConfigError("give one of num_blocks, largest and patterns")
    if stages < 1 or (stages > 1 and num_blocks is None):
        raise ConfigError(
            f"stages = {stages}: there is at least one, and num_blocks says how many pieces each is cut into"
        )
    if pieces == "modules" and (num_blocks is None or stages > 1 or balance != "parameters"):
        raise ConfigError(
            "pieces = 'modules' evens out the parameters of a number of contiguous blocks: give num_blocks, and leave "
            "out stages and balance = 'flops'"
        )
    cut = _cut(chain, pieces) if largest is None else pieces_up_to(chain, largest)
    if patterns is not None:
        groups: Sequence[Sequence[int]] = _by_patterns([layer.name for layer in chain.layers], patterns)
    elif largest is not None:
        groups = balanced_up_to([piece.size for piece in cut], largest)
    else:
        groups = _of_stages(balanced(_costs(chain, cut, balance, batch), (num_blocks or 0) * stages), stages)
    return Partition(chain, tuple(_block(chain, index, [cut[i] for i in group]) for index, group in enumerate(groups)))


def _cut(chain: Chain, pieces: str) -> list[Piece]:
    match pieces:
        case "layers":
            return whole_layers(chain)
        case "modules":
            return modules_apart(chain)
        case _:
            raise ConfigError(f"pieces '{pieces}' is unknown; {nearest(pieces, ['layers', 'modules'])}")


def _costs(chain: Chain, cut: Sequence[Piece], balance: str, batch: Mapping[str, Any] | None) -> list[float]:
    match balance:
        case "parameters":
            return [piece.size for piece in cut]
        case "flops":
            if batch is None:
                raise ConfigError("balance='flops' counts one forward pass: give batch={'input_ids': ...}")
            return [cost.forward_flops for cost in layer_costs(chain, batch)]
        case _:
            raise ConfigError(f"balance '{balance}' is unknown; {nearest(balance, ['parameters', 'flops'])}")


def _of_stages(runs: Sequence[range], stages: int) -> list[list[int]]:
    """Of each block, its layers: one run of each stage.

    >>> _of_stages([range(0, 2), range(2, 3), range(3, 4), range(4, 6)], 2)
    [[0, 1, 3], [2, 4, 5]]
    """
    count = len(runs) // stages
    return [[layer for run in runs[block::count] for layer in run] for block in range(count)]


def _by_patterns(names: Sequence[str], patterns: Sequence[Sequence[str]]) -> list[range]:
    place: dict[str, int] = {}
    for block, group in enumerate(patterns):
        for pattern in group:
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched:
                raise PartitionError(
                    f"pattern '{pattern}' of block {block} matches no layer; layers: {', '.join(names)}"
                )
            for name in matched:
                place.setdefault(name, block)
    left_out = [name for name in names if name not in place]
    if left_out:
        raise PartitionError(f"no pattern matches layer '{left_out[0]}'; every layer must be in a block")
    groups = []
    for block in range(len(patterns)):
        mine = [position for position, name in enumerate(names) if place[name] == block]
        if not mine:
            raise PartitionError(f"block {block} is empty: earlier patterns already took all its layers")
        if mine[-1] - mine[0] + 1 != len(mine):
            raise PartitionError(f"block {block} is not contiguous: {', '.join(names[i] for i in mine)}")
        groups.append(range(mine[0], mine[-1] + 1))
    if sorted(groups, key=lambda group: group.start) != groups:
        raise PartitionError("the patterns' blocks are not in the order of the model's layers; reorder them")
    return groups


def _block(chain: Chain, index: int, cut: Sequence[Piece]) -> Block:
    parameters = {name: parameter for piece in cut for name, parameter in piece.parameters.items()}
    layers = tuple(chain.layers[layer] for layer in dict.fromkeys(piece.layer for piece in cut))
    names = tuple(piece.name for piece in cut)
    if not parameters:
        raise PartitionError(f"block {index} ({', '.join(names)}) owns no parameters: use fewer blocks")
    rows: dict[str, range] = {}
    for piece in cut:
        if piece.rows is not None:
            (name,) = piece.parameters
            before = rows.get(name, piece.rows)  # two ranges of one parameter that came together
            rows[name] = range(min(before.start, piece.rows.start), piece.rows.stop)
    return Block(index, layers, parameters, rows, names)

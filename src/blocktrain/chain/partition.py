"""`partition(model, num_blocks=M)`: from a model to its blocks (paper Algorithm 1, line 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from blocktrain.chain.balance import balanced, balanced_up_to
from blocktrain.chain.block import Block, Partition
from blocktrain.chain.chain import Chain, Layer
from blocktrain.chain.cost import layer_costs
from blocktrain.chain.discovery import find_chain
from blocktrain.chain.freezing import untrained_parameters
from blocktrain.chain.partition_config import Balance, PartitionConfig, Pieces
from blocktrain.chain.segment import Segment, layer_segments, module_segments, segments_up_to
from blocktrain.errors import ConfigError, PartitionError


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
    """Cut `model` into blocks. They are contiguous unless `stages` is given, and consist of whole layers unless
    `pieces` or `largest` is given.

    model: a Hugging Face causal LM, an `nn.Sequential`, `blocktrain.resnet(...)`, or any module whose `layers`
        are given as `{layer name: [dotted module paths]}` in forward order.
    num_blocks: how many blocks (M); 1 is ordinary full-parameter training.
    stages: how many stages of a pipeline (P). The chain is cut into P x M pieces, and block k has the k-th piece of
        every stage (the paper's Figure 2), so each process always trains one piece and has the others frozen. With 1,
        blocks are contiguous.
    pieces: what blocks are made of: whole `"layers"`, or `"modules"`, each with one matrix, so that a few blocks have
        more nearly equal parameters (see `segment.py`).
    largest: instead of `num_blocks`, the most scalars that a block may own; there are then as few blocks as possible.
        A larger layer is split into its modules, and a larger matrix into ranges of rows (see `segment.py`).
    balance: divide so that blocks have nearly equal `"parameters"` (memory) or `"flops"` (counted forward FLOPs of
        `batch`, the keyword arguments of one forward call).
    patterns: instead of `num_blocks`, one list of shell patterns for each block, matched against whole layer names:
        `[["embedding", "transformer.h.[0-3]"], ["transformer.h.*", "head"]]`. A layer goes to the first block that
        names it; a block must be contiguous, and a pattern that matches nothing is an error.

    Parameters that do not require gradients now are in no block, so nothing trains them; a layer of such parameters
    alone is in no block either.

    Raises `PartitionError` when the model cannot be cut so, `ConfigError` for contradictory arguments.
    """
    if [num_blocks, largest, patterns].count(None) != 2:
        raise ConfigError("give exactly one of num_blocks, largest and patterns")
    config = PartitionConfig(
        **({} if num_blocks is None else {"count": num_blocks}),
        stages=stages,
        pieces=pieces,
        largest=largest,
        balance=balance,
        patterns=patterns,
        layers=layers,
    )
    return partition_by_config(model, config, batch=batch)


def partition_by_config(
    model: nn.Module, config: PartitionConfig, *, batch: Mapping[str, Any] | None = None
) -> Partition:
    """Cut `model` as `config` says; batch: one forward call's keyword arguments, for `balance = "flops"`."""
    chain = find_chain(model, config.layers)
    chain = replace(chain, untrained=chain.untrained | untrained_parameters(chain))
    if not any(chain.owned):
        raise PartitionError(
            f"no parameter of {type(model).__name__} requires gradients, so there is nothing to train: call "
            "requires_grad_(True) on those that are to be trained, before the model is cut into blocks"
        )
    if config.patterns is not None:
        segments = layer_segments(chain)
        groups: Sequence[Sequence[int]] = _groups_by_patterns([layer.name for layer in chain.layers], config.patterns)
    elif config.largest is not None:
        segments = segments_up_to(chain, config.largest)
        groups = balanced_up_to([segment.size for segment in segments], config.largest)
    else:
        segments = module_segments(chain) if config.pieces == "modules" else layer_segments(chain)
        if config.balance == "parameters":
            costs: list[float] = [segment.size for segment in segments]
        elif batch is not None:
            costs = [cost.forward_flops for cost in layer_costs(chain, batch)]
        else:
            raise ConfigError("balance = 'flops' counts the FLOPs of a forward pass: give batch={'input_ids': ...}")
        groups = _groups_by_stages(balanced(costs, config.count * config.stages), config.stages)
    return Partition(chain, [_block(chain, i, [segments[j] for j in group]) for i, group in enumerate(groups)])


def _groups_by_stages(runs: Sequence[range], stages: int) -> list[list[int]]:
    """The layers of each block: one run of every stage.

    >>> _groups_by_stages([range(0, 2), range(2, 3), range(3, 4), range(4, 6)], 2)
    [[0, 1, 3], [2, 4, 5]]
    """
    count = len(runs) // stages
    return [[layer for run in runs[block::count] for layer in run] for block in range(count)]


def _groups_by_patterns(names: Sequence[str], patterns: Sequence[Sequence[str]]) -> list[range]:
    """The layers of each block; a layer goes to the first block whose patterns match its name."""
    block_of: dict[str, int] = {}
    for block, group in enumerate(patterns):
        for pattern in group:
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched:
                raise PartitionError(
                    f"pattern '{pattern}' of block {block} matches no layer; layers: {', '.join(names)}"
                )
            for name in matched:
                block_of.setdefault(name, block)
    left_out = [name for name in names if name not in block_of]
    if left_out:
        raise PartitionError(f"no pattern matches layer '{left_out[0]}'; every layer must be in a block")
    groups = []
    for block in range(len(patterns)):
        mine = [position for position, name in enumerate(names) if block_of[name] == block]
        if not mine:
            raise PartitionError(f"block {block} is empty: earlier patterns already took all its layers")
        if mine[-1] - mine[0] + 1 != len(mine):
            raise PartitionError(f"block {block} is not contiguous: {', '.join(names[i] for i in mine)}")
        groups.append(range(mine[0], mine[-1] + 1))
    if sorted(groups, key=lambda group: group.start) != groups:
        raise PartitionError("the patterns' blocks are not in the order of the model's layers; reorder them")
    return groups


def _block(chain: Chain, index: int, segments: Sequence[Segment]) -> Block:
    parameters = {name: parameter for segment in segments for name, parameter in segment.parameters.items()}
    if not parameters:
        names = ", ".join(segment.name for segment in segments)
        why = " that require gradients" if chain.untrained else ""
        raise PartitionError(f"block {index} ({names}) owns no parameters{why}: use fewer blocks")
    idle = {layer.index for layer in chain.layers if _is_untrained(chain, layer)}
    segments = [segment for segment in segments if segment.layer not in idle]
    names = tuple(segment.name for segment in segments)
    rows: dict[str, range] = {}
    for segment in segments:
        if segment.rows is not None:
            (name,) = segment.parameters
            start = rows.get(name, segment.rows).start  # adjacent ranges of one parameter are joined
            rows[name] = range(start, segment.rows.stop)
    layers = tuple(chain.layers[layer] for layer in dict.fromkeys(segment.layer for segment in segments))
    return Block(index, layers, parameters, rows, names)


def _is_untrained(chain: Chain, layer: Layer) -> bool:
    """Whether the layer owns nothing because its parameters must not be trained (and not because they are tied)."""
    return not chain.owned[layer.index] and any(name in chain.untrained for name, _ in layer.named_parameters())

"""Which layers each stage of a pipeline runs: plain numbers in, plain ranges out. Stage s is on process s mod P.

Blocks that have a piece of each stage (`partition(..., stages=P)`, the paper's Figure 2), one stage per process; the
stages are equal in every visit:

    layers      a a b b c c | a a b b c c        a, b, c: the blocks
    process          0      |      1

Contiguous blocks, one stage per process, balanced for each visit by what a step costs in each layer:

    layers      a a a|a b b b b c c c c          b is trained: forward passes 1 in the prefix, 3 in b, 2 in the tail
    process       0  |         1
    layers              b b b|b c c c c          the prefix is stored: what remains is for all processes
    process               0  |    1

Contiguous blocks, M stages per process (the interleaved schedule), each block over all processes; the stages are equal
in every visit:

    layers      a a|a a|b b|b b|c c|c c
    process      0 | 1 | 0 | 1 | 0 | 1
"""

from __future__ import annotations

from collections.abc import Sequence

from blocktrain.chain.balance import balanced
from blocktrain.chain.block import Block, Partition
from blocktrain.errors import ConfigError, PartitionError
from blocktrain.parallel.config import PipelineConfig

# What a step costs a layer, in forward passes, by where it lies: the prefix runs forward; the block also computes the
# gradients of its activations and weights, the tail those of its activations only.
PREFIX_COST, BLOCK_COST, TAIL_COST = 1, 3, 2


def stages(
    partition: Partition, block: Block, processes: int, config: PipelineConfig, costs: Sequence[float]
) -> tuple[range, ...]:
    """The layers of each stage in a visit to `block`, in order; those below a stored boundary are left out.

    costs: of each layer's forward pass, in any unit. Raises `ConfigError` where there are too few layers.
    """
    owner: dict[int, int] = {}  # by layer: the first block that owns something of it
    for each in partition:
        for layer in each.layers:
            owner.setdefault(layer.index, each.index)
    owners = [owner[layer.index] for layer in partition.chain.layers]
    # In blocks with a piece of each stage, a stage begins where the layers go back to an earlier block.
    starts = [layer for layer, mine in enumerate(owners) if layer == 0 or mine < owners[layer - 1]]
    boundary = block.boundary if config.start == "boundary" else 0
    try:
        if config.schedule == "interleaved":
            ranges = _split_each_block(owners, costs, processes)
        elif len(starts) > 1:
            ranges = [range(start, end) for start, end in zip(starts, [*starts[1:], len(owners)], strict=True)]
        else:
            ranges = _balanced_from(boundary, visit_costs(block, costs)[boundary:], processes)
    except PartitionError as error:
        what = f"{block} and its tail" if config.start == "boundary" else "the model"
        ways = "fewer processes or blocks" + (", or prefix.store = 'off'" if config.start == "boundary" else "")
        raise ConfigError(f"{processes} processes cannot share the layers of {what} ({error}); take {ways}") from error
    if config.schedule != "interleaved" and len(ranges) != processes:
        raise ConfigError(
            f"the blocks have pieces of {len(ranges)} stages, but there are {processes} processes, which run one stage "
            f"each; set blocks.stages = {processes}, or 1 for contiguous blocks"
        )
    return tuple(range(max(layers.start, boundary), layers.stop) for layers in ranges if layers.stop > boundary)


def require_stages(partition: Partition, processes: int, config: PipelineConfig, *, micro_batches: int) -> None:
    """Raise `ConfigError` where the processes could not share a visit to some block, or a step of `micro_batches`."""
    equal_costs = [1.0] * len(partition.chain.layers)  # costs decide where stages begin, not whether there are enough
    for block in partition:
        count = len(stages(partition, block, processes, config, equal_costs))
        require_micro_batches(config, micro_batches, count, processes)


def require_micro_batches(config: PipelineConfig, count: int, stage_count: int, processes: int) -> None:
    """Raise `ConfigError` where the schedule cannot run `count` micro-batches in a step."""
    if config.schedule == "1f1b" and count < stage_count:
        raise ConfigError(
            f"schedule '1f1b' needs at least {stage_count} micro-batches a step, one for each stage, not {count}"
        )
    if config.schedule == "interleaved" and count % max(1, count // processes):
        raise ConfigError(f"schedule 'interleaved' needs a multiple of {processes} micro-batches a step, not {count}")


def visit_costs(block: Block, costs: Sequence[float]) -> list[float]:
    """The cost of each layer in a step that trains `block`, in the unit of `costs` (of each layer's forward pass)."""
    trained = {layer.index for layer in block.layers}
    first = min(trained)
    return [
        cost * (BLOCK_COST if layer in trained else TAIL_COST if layer > first else PREFIX_COST)
        for layer, cost in enumerate(costs)
    ]


def _balanced_from(start: int, costs: Sequence[float], count: int) -> list[range]:
    """The layers from `start`, which have `costs`, in `count` contiguous ranges of about equal cost."""
    return [range(part.start + start, part.stop + start) for part in balanced(costs, count)]


def _split_each_block(owners: Sequence[int], costs: Sequence[float], processes: int) -> list[range]:
    """One stage of each block on each process."""
    ranges = []
    for index in range(owners[-1] + 1):
        layers = [layer for layer, owner in enumerate(owners) if owner == index]
        if not layers or layers[-1] - layers[0] + 1 != len(layers):
            raise ConfigError(
                "schedule 'interleaved' needs contiguous blocks of whole layers; partition without stages"
            )
        ranges += _balanced_from(layers[0], [costs[layer] for layer in layers], processes)
    return ranges

"""Which layers each stage of a pipeline runs: plain numbers in, plain ranges out. Stage s is on process s mod P.

Blocks that have a piece of each stage (`partition(..., stages=P)`, the paper's Figure 2), one stage a process; the same
in every visit:

    layers      a a b b c c | a a b b c c        a, b, c: the blocks
    process          0      |      1

Contiguous blocks, one stage a process; spread anew in every visit, by what a step costs each layer:

    layers      a a a|a b b b b c c c c          b is trained: forward passes 1 in the prefix, 3 in b, 2 in the tail
    process       0  |         1
    layers              b b b|b c c c c          the prefix is stored: what remains is for all processes
    process               0  |    1

Contiguous blocks, M stages a process (the interleaved schedule): each block over all processes, the same every visit:

    layers      a a|a a|b b|b b|c c|c c
    process      0 | 1 | 0 | 1 | 0 | 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from blocktrain.chain.balance import balanced
from blocktrain.chain.block import Block, Partition
from blocktrain.errors import ConfigError, PartitionError, nearest

Schedule = Literal["gpipe", "1f1b", "interleaved"]

FORWARD, TRAINED, PASSED = 1, 3, 2  # of a layer in a step, in forward passes: in the prefix, in the block, in the tail


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a model's layers are worked on by several processes, one after the other.

    schedule: "gpipe" and "1f1b" (fewer activations alive) run one stage a process, "interleaved" one of each block.
    start: what a step starts from: the "inputs", or the hidden states stored at the "boundary" below the active block.
    """

    schedule: Schedule = "1f1b"
    start: Literal["inputs", "boundary"] = "inputs"

    def __post_init__(self) -> None:
        if "zero" in self.schedule or "zb" in self.schedule or "dual" in self.schedule:
            raise ConfigError(
                f"schedule '{self.schedule}' takes weight gradients apart from those of activations, and where the "
                "active block begins a later stage it takes none at all and says nothing (PyTorch 2.13); take '1f1b'"
            )
        for name, value, known in (
            ("schedule", self.schedule, get_args(Schedule)),
            ("start", self.start, ("inputs", "boundary")),
        ):
            if value not in known:
                raise ConfigError(f"{name} '{value}' is unknown; {nearest(value, known)}")


def stages(
    partition: Partition, block: Block, processes: int, config: PipelineConfig, costs: Sequence[float]
) -> tuple[range, ...]:
    """The layers of each stage in a visit to `block`, in order; those below a stored boundary are left out.

    costs: of each layer's forward pass, in any unit. Raises `ConfigError` where there are too few layers.
    """
    of_layers = _blocks_of_layers(partition)
    level = block.boundary if config.start == "boundary" else 0
    try:
        if config.schedule == "interleaved":
            runs = _each_block_over_all(of_layers, costs, processes)
        elif (fixed := _where_blocks_begin_again(of_layers)) and len(fixed) > 1:
            runs = fixed
        else:
            runs = _spread(block, costs, processes, level)
    except PartitionError as error:
        what = f"{block} and its tail" if config.start == "boundary" else "the model"
        ways = "fewer processes or blocks" + (", or prefix.store = 'off'" if config.start == "boundary" else "")
        raise ConfigError(f"{processes} processes cannot share the layers of {what} ({error}); take {ways}") from error
    if config.schedule != "interleaved" and len(runs) != processes:
        raise ConfigError(
            f"the blocks have pieces of {len(runs)} stages, and there are {processes} processes, which run one each; "
            f"set blocks.stages = {processes}, or 1 for contiguous blocks"
        )
    return tuple(range(max(run.start, level), run.stop) for run in runs if run.stop > level)


def require_stages(partition: Partition, processes: int, config: PipelineConfig, *, micro_batches: int) -> None:
    """Raise `ConfigError` where a visit to some block, or a step of so many micro-batches, could not be shared."""
    alike = [1.0] * len(
        partition.chain.layers
    )  # where stages begin depends on costs, whether there are enough does not
    for block in partition:
        count = len(stages(partition, block, processes, config, alike))
        require_micro_batches(config, micro_batches, count, processes)


def require_micro_batches(config: PipelineConfig, count: int, stage_count: int, processes: int) -> None:
    """Raise `ConfigError` where a schedule has no use for `count` micro-batches a step."""
    if config.schedule == "1f1b" and count < stage_count:
        raise ConfigError(
            f"schedule '1f1b' needs at least {stage_count} micro-batches a step, one a stage, not {count}"
        )
    if config.schedule == "interleaved" and count % max(1, count // processes):
        raise ConfigError(f"schedule 'interleaved' needs a multiple of {processes} micro-batches a step, not {count}")


def visit_costs(block: Block, costs: Sequence[float]) -> list[float]:
    """Of each layer in a step that trains `block`, in the unit of `costs`."""
    trained = {layer.index for layer in block.layers}
    first = min(trained)
    return [
        cost * (TRAINED if layer in trained else PASSED if layer > first else FORWARD)
        for layer, cost in enumerate(costs)
    ]


def _spread(block: Block, costs: Sequence[float], processes: int, level: int) -> list[range]:
    """What remains above `level`, in as even parts as there are processes."""
    found = balanced(visit_costs(block, costs)[level:], processes)
    return [range(part.start + level, part.stop + level) for part in found]


def _each_block_over_all(of_layers: Sequence[int], costs: Sequence[float], processes: int) -> list[range]:
    found = []
    for index in range(of_layers[-1] + 1):
        layers = [layer for layer, owner in enumerate(of_layers) if owner == index]
        if not layers or layers[-1] - layers[0] + 1 != len(layers):
            raise ConfigError(
                "schedule 'interleaved' needs contiguous blocks of whole layers; partition without stages"
            )
        for part in balanced([costs[layer] for layer in layers], processes):
            found.append(range(part.start + layers[0], part.stop + layers[0]))
    return found


def _where_blocks_begin_again(of_layers: Sequence[int]) -> list[range]:
    """A new stage begins where an earlier block comes after a later one."""
    starts = [layer for layer, owner in enumerate(of_layers) if layer == 0 or owner < of_layers[layer - 1]]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(of_layers)], strict=True)]


def _blocks_of_layers(partition: Partition) -> list[int]:
    """Of each layer the first block that owns something of it."""
    first: dict[int, int] = {}
    for block in partition:
        for layer in block.layers:
            first.setdefault(id(layer), block.index)
    return [first[id(layer)] for layer in partition.chain.layers]

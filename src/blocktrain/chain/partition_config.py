"""The options of a partition: one dataclass for `blocktrain.partition`, for the table `[blocks]` of a run and for the
`Blocks` of the Hugging Face Trainer. It needs no PyTorch, so that the planner may import it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from blocktrain.errors import ConfigError, nearest

Balance = Literal["parameters", "flops"]
Pieces = Literal["layers", "modules"]


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """How a model is cut into blocks: by their number, their size, or the names of their layers.

    count: how many blocks (M); 1 is full-parameter training. Ignored where `largest` or `patterns` is given.
    stages: how many stages of a pipeline the model is cut into; each block then has one piece of every stage (the
        paper's Figure 2). With 1, a block is contiguous.
    pieces: what blocks are made of: whole layers, or modules, each with one matrix, which makes a few blocks more
        nearly equal.
    largest: instead of `count`, the most parameters that a block may have; there are then as few blocks as possible. A
        larger layer is split into its modules, and a larger matrix into ranges of rows.
    balance: what is divided evenly: parameters, which decide the memory, or the FLOPs of a forward pass, counted.
    patterns: instead of `count`, a list of shell patterns over layer names for each block.
    layers: for a model whose layers are not found automatically: the module paths of each layer, in forward order.

    Raises `ConfigError` for options that do not go together.
    """

    count: int = 3
    stages: int = 1
    pieces: Pieces = "layers"
    largest: int | None = None
    balance: Balance = "parameters"
    patterns: Sequence[Sequence[str]] | None = None
    layers: Mapping[str, Sequence[str]] | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"count must be at least 1, not {self.count}; 1 is full-parameter training")
        if self.stages < 1:
            raise ConfigError(f"stages = {self.stages} must be at least 1; 1 makes contiguous blocks")
        for key, value, known in (
            ("pieces", self.pieces, get_args(Pieces)),
            ("balance", self.balance, get_args(Balance)),
        ):
            if value not in known:
                raise ConfigError(f"{key} '{value}' is unknown; {nearest(value, known)}")
        if self.largest is not None and self.patterns is not None:
            raise ConfigError("give largest or patterns, not both: patterns already say what each block consists of")
        by_count = self.largest is None and self.patterns is None
        if self.stages > 1 and not by_count:
            raise ConfigError(
                f"stages = {self.stages} cuts the model into a number of blocks: give that number, and leave out "
                "largest and patterns"
            )
        if self.pieces == "modules" and (not by_count or self.stages > 1 or self.balance != "parameters"):
            raise ConfigError(
                "pieces = 'modules' evens out the parameters of a number of contiguous blocks: give that number, and "
                "leave out largest, patterns, stages and balance = 'flops'"
            )

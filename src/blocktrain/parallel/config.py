"""The configuration of training with several processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from blocktrain.errors import ConfigError, nearest

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]
DtypeName = Literal["fp32", "bf16"]

TORCH_DTYPES: dict[DtypeName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How several processes work together (started with torchrun; one alone needs none of this).

    layout: "data": each process has the whole model and its share of a step's rows (data parallel). "pipeline": each
        process runs some of the layers. "fsdp": each has its share of the rows and a shard of every weight (FSDP2).
        A single process has everything.
    pipeline: the schedule of layout "pipeline"; "interleaved" has M stages per process.
    reduce_dtype: the dtype in which gradients are sent and summed.
    bucket_bytes: bytes of gradients that are sent together.
    timeout_seconds: how long a process waits for another before it gives up.
    sync_every: None sums gradients in each step. H takes H local steps and then averages the active block.
    outer_lr, outer_momentum: of the Nesterov step along that average (DiLoCo, arXiv 2311.08105, section 2).
    """

    layout: Literal["data", "pipeline", "fsdp"] = "data"
    pipeline: PipelineSchedule = "1f1b"
    reduce_dtype: DtypeName = "fp32"
    bucket_bytes: int = 25 * 2**20
    timeout_seconds: float = 600.0
    sync_every: int | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes must be at least 1, not {self.bucket_bytes}")
        if not self.timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be positive, not {self.timeout_seconds:g}")
        if self.sync_every is not None and self.sync_every < 1:
            raise ConfigError(f"sync_every must be at least 1, not {self.sync_every}")
        if self.sync_every is not None and self.layout != "data":
            raise ConfigError(
                f"sync_every lets each process take local steps: set layout = 'data', not '{self.layout}'"
            )
        if not self.outer_lr > 0 or not 0 <= self.outer_momentum < 1:
            raise ConfigError(
                f"outer_lr must be positive and outer_momentum in [0, 1), not {self.outer_lr:g} and "
                f"{self.outer_momentum:g}"
            )


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the layers of a model are run by several processes, one after the other.

    schedule: "gpipe" and "1f1b" (fewer activations alive) run one stage per process, "interleaved" one stage of each
        block.
    start: what a step starts from: the "inputs", or the hidden states stored at the "boundary" below the active block.
    """

    schedule: PipelineSchedule = "1f1b"
    start: Literal["inputs", "boundary"] = "inputs"

    def __post_init__(self) -> None:
        if "zero" in self.schedule or "zb" in self.schedule or "dual" in self.schedule:
            raise ConfigError(
                f"schedule '{self.schedule}' computes weight gradients separately from activation gradients, and where "
                "the active block begins at a later stage it computes none at all, without an error (PyTorch 2.13); "
                "take '1f1b'"
            )
        for name, value, known in (
            ("schedule", self.schedule, get_args(PipelineSchedule)),
            ("start", self.start, ("inputs", "boundary")),
        ):
            if value not in known:
                raise ConfigError(f"{name} '{value}' is unknown; {nearest(value, known)}")


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """The dtypes of what FSDP2 sends; the shards themselves keep the model's dtype.

    compute_dtype: of all-gathered weights and of the computation with them.
    reduce_dtype: of reduce-scattered gradients.
    """

    compute_dtype: DtypeName = "fp32"
    reduce_dtype: DtypeName = "fp32"

"""Verifies a plan (`blocktrain plan --verify`): runs the planned steps on fake tensors while a tracker counts bytes.

Everything is built from the configuration that `plan --out` writes, by the functions that build a run: so this checks
the closed form of `plan/memory.py` against the code that the user will run. `train/predict_memory.py` does the same for
a run that exists; here the model is a shape, no data are opened, and only the steps of a visit count, without its
activation and retirement.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from blocktrain.chain.block import Block
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.chain.model_loading import ModelConfig, load_model
from blocktrain.chain.partition import partition_by_config
from blocktrain.data.text import TextConfig
from blocktrain.memory.fake import fake_copy
from blocktrain.memory.parts import HOST
from blocktrain.memory.tracker import MemoryTracker
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.weight_store import OnHost
from blocktrain.parallel.ranks import Ranks
from blocktrain.plan.spec import ModelSpec
from blocktrain.runtime import AlwaysCopying
from blocktrain.train.config import RunConfig
from blocktrain.train.context import optimizer_of
from blocktrain.train.techniques.memory_saving import saving_memory

STEPS = 2  # the first of a visit makes the moments, so the second counts
MOST_MICRO_STEPS = 3  # a fourth micro-batch finds what the third found


def meta_model(spec: ModelSpec) -> nn.Module:
    """The model of transformers that `spec` describes, on the meta device."""
    with torch.device("meta"):
        return load_model(ModelConfig(architecture=spec.architecture, config=spec.settings()))


def tracked_peak(config: RunConfig) -> dict[int, int]:
    """Peak bytes on the device in a visit's second step, by block index: of the first block, a middle one, the largest
    one and the last.

    config: a run on text, on one device. Host and device are counted as two memories, although both are this machine's.
    """
    assert isinstance(config.data, TextConfig)
    with torch.device("meta"):
        fake = fake_copy(load_model(config.model))
    ids = torch.zeros(1, config.data.row_tokens, dtype=torch.long)
    partition = partition_by_config(fake.model, config.blocks, batch={"input_ids": ids, "labels": ids})
    optimizer = optimizer_of(config, partition, Path(), Ranks(), on_host=OnHost(side_stream=AlwaysCopying))
    runner = BoundaryRunner(partition.chain)
    largest = max(partition, key=lambda block: block.num_parameters).index
    blocks = [partition[index] for index in sorted({0, len(partition) // 2, largest, len(partition) - 1})]
    peaks: dict[int, int] = {}
    with saving_memory(partition, config.memory):
        for block in blocks:
            with fake.running(), MemoryTracker() as tracker:
                frozen = [*fake.model.parameters(), *fake.model.buffers(), *optimizer.tensors()["frozen"]]
                tracker.label("frozen", frozen)
                tracker.label(HOST, optimizer.tensors()["host"])
                with optimizer.visit(block):
                    for _ in range(STEPS):
                        tracker.reset_peak()
                        _take_step(config, optimizer, runner, block)
                    peaks[block.index] = tracker.peak().bytes
    return peaks


def _take_step(config: RunConfig, optimizer: BlockOptimizer, runner: BoundaryRunner, block: Block) -> None:
    """A step on a model without memory, over stored rows where the configuration has a prefix cache."""
    assert isinstance(config.data, TextConfig)
    model = optimizer.partition.model
    micro_rows = config.batch.micro_rows if isinstance(config.batch.micro_rows, int) else config.batch.rows
    ids = torch.zeros(micro_rows, config.data.row_tokens, dtype=torch.long)  # (micro_rows, row_tokens)
    boundary = block.boundary if config.prefix.store != "off" else 0
    width = cast(Any, model.config).hidden_size
    for _ in range(min(config.batch.rows // micro_rows, MOST_MICRO_STEPS)):
        hidden = next(model.parameters()).new_empty(*ids.shape, width) if boundary else None
        with runner.running(start=boundary, hidden=hidden):
            model(input_ids=ids, labels=ids).loss.backward()
    optimizer.clip_grad_norm(config.optimizer.max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()

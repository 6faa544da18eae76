"""`blocktrain plan --verify`: the chosen layout's step, run on a model without memory while a tracker counts bytes.

The step is this package's own (`BlockOptimizer`, the prefix cut, `[memory]`'s savings), so this checks the closed form
of `plan/memory.py` against the code it describes. `train/memory_profile.py` does the same for a run that exists; here
the model is a shape, and what counts is a visit's steps, without activation and retirement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from blocktrain.chain.block import Block
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.chain.partition import partition as cut_into_blocks
from blocktrain.memory.fake import FakeCopy, fake_copy
from blocktrain.memory.parts import HOST
from blocktrain.memory.tracker import MemoryTracker
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.offloaded_weights import OnDevice, OnHost
from blocktrain.optim.precision import preset
from blocktrain.plan.layout import Layout
from blocktrain.plan.spec import ModelSpec
from blocktrain.runtime import SideStream
from blocktrain.train.config import MemoryConfig
from blocktrain.train.techniques.memory_saving import saving_memory

STEPS = 2  # the second of a visit finds the moments there


def meta_model(spec: ModelSpec) -> nn.Module:
    """The model of transformers that `spec` describes, on the meta device."""
    settings = AutoConfig.for_model(
        spec.architecture, **spec.settings(), use_cache=False, bos_token_id=None, eos_token_id=None
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa")


def tracked_peak(spec: ModelSpec, layout: Layout, *, seq: int, micro_steps: int = 1) -> dict[int, int]:
    """Peak bytes on one card of a visit's second step, by block: the first, a middle one, the largest and the last."""
    fake = fake_copy(meta_model(spec))
    by_number = layout.largest is None
    partition = cut_into_blocks(
        fake.model, num_blocks=layout.blocks if by_number else None, pieces=layout.pieces, largest=layout.largest
    )
    options: dict[str, Any] = {"fused": True} if layout.moments == "fp32" else {}
    memory = MemoryConfig(
        frozen=layout.frozen,
        checkpointing="layers" if layout.checkpointing == "layers" else "off",
        loss_chunk=layout.loss_chunk,
    )
    with _copies_seen():
        optimizer = BlockOptimizer(
            partition,
            torch.optim.AdamW,
            lr=1e-4,
            precision=replace(preset(layout.precision.name), moments=layout.moments),
            frozen=OnHost() if layout.frozen == "host" else OnDevice(),
            **options,
        )
        largest = max(partition, key=lambda block: block.num_parameters).index
        blocks = [partition[index] for index in sorted({0, len(partition) // 2, largest, len(partition) - 1})]
        take = _Passes(fake=fake, cut=BoundaryRunner(partition.chain), layout=layout, seq=seq, micro_steps=micro_steps)
        with saving_memory(partition, memory):
            return {block.index: _peak(fake, optimizer, block, take) for block in blocks}


@contextlib.contextmanager
def _copies_seen() -> Iterator[None]:
    """Host and device are one here, so that nothing would be copied to the device: inside, it is."""
    copying = SideStream.to_device
    SideStream.to_device = lambda self, tensor: tensor.clone()
    try:
        yield
    finally:
        SideStream.to_device = copying


def _peak(fake: FakeCopy, optimizer: BlockOptimizer, block: Block, take: Callable[[int], None]) -> int:
    """take: the step's forward and backward passes, given which layer of the chain is the first of `block`."""
    first = block.boundary
    tracker = MemoryTracker()
    with fake.running(), tracker:
        tracker.label("weights", [*fake.model.parameters(), *fake.model.buffers(), *optimizer.tensors()["frozen"]])
        tracker.label(HOST, optimizer.tensors()["host"])
        with optimizer.visit(block):
            for _ in range(STEPS):
                tracker.reset_peak()
                take(first)
                optimizer.step()
                optimizer.zero_grad()
            return tracker.peak().bytes


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """Forward and backward passes of a step's micro-batches, over stored rows where the layout has a prefix cache."""

    fake: FakeCopy
    cut: BoundaryRunner
    layout: Layout
    seq: int
    micro_steps: int

    def __call__(self, first: int) -> None:
        level = first if self.layout.cache != "off" else 0
        ids = torch.zeros(self.layout.micro_rows, self.seq, dtype=torch.long)
        width = cast(Any, self.fake.model.config).hidden_size
        for _ in range(self.micro_steps):
            hidden = next(self.fake.model.parameters()).new_empty(*ids.shape, width) if level else None
            with self.cut.running(start=level, hidden=hidden):
                self.fake.model(input_ids=ids, labels=ids).loss.backward()

"""`blocktrain plan --verify`: the chosen layout's step, run on a model without memory while a tracker counts bytes.

The step is this package's own (`BlockOptimizer`, fused AdamW, the prefix cut), so this checks the closed form of
`memory.py` against the code it describes. The tracker sees every tensor an operation returns and hears when its storage
dies, as PyTorch's `torch.distributed._tools.mem_tracker.MemTracker` does; the two agree to the byte where both were run
(benchmarks/plan), but MemTracker also keeps a snapshot of every module and takes minutes for a deep model.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from blocktrain.blocks.block import Block
from blocktrain.blocks.partition import partition as cut_into_blocks
from blocktrain.model.cut import Cut
from blocktrain.model.fake import FakeCopy, fake_copy
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.precision import preset
from blocktrain.plan.layout import Layout
from blocktrain.plan.spec import ModelSpec

STEPS = 2  # the second of a visit finds the moments there


class LiveBytes(TorchDispatchMode):
    """Bytes alive of the tensors made inside, and of those that are `added`; `peak` is the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count `tensors`, too."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._seen:
                self._seen[key] = weakref.ref(storage, lambda _, key=key, size=size: self._gone(key, size))
                self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def _gone(self, key: int, size: int) -> None:
        del self._seen[key]
        self.now -= size


def meta_model(spec: ModelSpec) -> nn.Module:
    """The model of transformers that `spec` describes, on the meta device."""
    settings = AutoConfig.for_model(
        spec.architecture, **spec.settings(), use_cache=False, bos_token_id=None, eos_token_id=None
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa")


@contextlib.contextmanager
def recomputed(model: nn.Module, layers: Iterable[str]) -> Iterator[None]:
    """Inside, each of the modules named `layers` computes its activations again in the backward pass."""
    changed = []
    for path in layers:
        layer = model.get_submodule(path)
        forward = layer.forward

        def again(hidden: Tensor, *args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
            return checkpoint(_forward, hidden, *args, use_reentrant=False, **kwargs)

        layer.forward = again
        changed.append(layer)
    try:
        yield
    finally:
        for layer in changed:
            del layer.forward


def tracked_peak(spec: ModelSpec, layout: Layout, *, seq: int) -> dict[int, int]:
    """Peak bytes on one card of a visit's second step, by block: the first, a middle and the last."""
    fake = fake_copy(meta_model(spec))
    partition = cut_into_blocks(fake.model, num_blocks=layout.blocks)
    optimizer = BlockOptimizer(
        partition, torch.optim.AdamW, lr=1e-4, fused=True, precision=preset(layout.precision.name)
    )
    layers = [layer.name for layer in partition.chain.layers[1:-1]] if layout.checkpointing == "layers" else []
    blocks = [partition[index] for index in sorted({0, layout.blocks // 2, layout.blocks - 1})]
    with recomputed(fake.model, layers):
        return {block.index: _peak(fake, optimizer, block, layout, seq) for block in blocks}


def _peak(fake: FakeCopy, optimizer: BlockOptimizer, block: Block, layout: Layout, seq: int) -> int:
    partition = optimizer.partition
    first = partition.chain.layers.index(block.layers[0])
    level = first if layout.cache != "off" else 0
    ids = torch.zeros(layout.micro_rows, seq, dtype=torch.long)
    weight = next(fake.model.parameters())
    cut = Cut(partition.chain)
    width = cast(Any, fake.model.config).hidden_size
    live = LiveBytes()
    with fake.running(), live:
        live.add([*fake.model.parameters(), *fake.model.buffers()])
        with optimizer.visit(block):
            for _ in range(STEPS):
                live.peak = live.now
                hidden = weight.new_empty(layout.micro_rows, seq, width) if level else None
                with cut.running(level=level, hidden=hidden):
                    fake.model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return live.peak

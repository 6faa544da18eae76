"""Activation checkpointing that respects blocks: layers that a backward pass goes through keep their inputs alone.

    frozen prefix            active block             frozen tail
    keeps nothing            layers' inputs           layers' inputs          (`boundaries`: device or host)
    runs once                runs twice               runs twice

A layer's transformer or residual unit is worth it; a table, a norm or a single matrix product is not: it keeps little
but its input anyway. The logits are another matter (see `modules/chunked_loss.py`).

Hugging Face's own switch acts only in train mode, so never on frozen layers, and its reentrant kind loses the
gradients of a block behind a frozen prefix. Where it is on, reentrant or not, ours takes over for as long as a block is
active: no layer is checkpointed twice, and both kinds give the right gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import nn

from blocktrain.chain.block import Partition
from blocktrain.chain.chain import Chain
from blocktrain.modules.host_boundaries import HostOffload
from blocktrain.modules.recompute import Recomputed
from blocktrain.modules.wrap import wrap_forward

Boundaries = Literal["device", "host"]

_taken_over: WeakKeyDictionary[nn.Module, Callable[[], None]] = WeakKeyDictionary()  # model -> what hands back


@contextmanager
def checkpointing(partition: Partition, *, boundaries: Boundaries = "device") -> Iterator[None]:
    """Inside, each layer that gradients flow through keeps its input and computes the rest again in the backward pass.

    partition: of the model; that of the `BlockOptimizer` whose visits run inside.
    boundaries: where those inputs wait: on the `device`, or on the `host` (pinned memory on CUDA), copied there and
        back beside the computation.

    Gradients are bit-equal to those without (CPU, fp32), dropout included. A forward pass and its backward pass must
    both lie inside. Costs one more forward pass of the layers above the prefix, less what nothing needs again.

    Keys and values are not cached for later tokens where gradients are taken (as with `use_cache=False`: the cache a
    model returns is empty); a layer that reads a filled cache runs as it is.
    """
    undo = _install(partition, boundaries)
    try:
        yield
    finally:
        undo()


def checkpointed_layers(chain: Chain) -> list[int]:
    """Indices of the layers that `checkpointing` computes again."""
    return [index for index, layer in enumerate(chain.layers) if any(map(_worthwhile, layer.modules.values()))]


def disable_hf_checkpointing(partition: Partition) -> None:
    """Put ours in place of Hugging Face's activation checkpointing, if that is on, until `restore_hf_checkpointing`."""
    if partition.model not in _taken_over and _switched_on(partition.model):
        _taken_over[partition.model] = _install(partition, "device")


def restore_hf_checkpointing(partition: Partition) -> None:
    """Leave activation checkpointing to Hugging Face again, where it was taken over."""
    _taken_over.pop(partition.model, _nothing)()


def _install(partition: Partition, boundaries: Boundaries) -> Callable[[], None]:
    save_input = HostOffload().offloading if boundaries == "host" else None
    modules = [module for layer in partition.chain.layers for module in layer.modules.values() if _worthwhile(module)]
    removes = [wrap_forward(module, Recomputed(module, save_input)) for module in modules]
    theirs = _switched_on(partition.model)
    for module in theirs:
        module.gradient_checkpointing = False

    def undo() -> None:
        for remove in removes:
            remove()
        for module in theirs:
            module.gradient_checkpointing = True

    return undo


def _worthwhile(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _switched_on(model: nn.Module) -> list[Any]:
    """The modules in which Hugging Face's own checkpointing is on."""
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]


def _nothing() -> None:
    pass

"""Activation checkpointing that knows about blocks: layers that the backward pass goes through save only their inputs.

    frozen prefix            active block             frozen tail
    saves nothing            layers' inputs           layers' inputs          (`boundaries`: device or host)
    runs once                runs twice               runs twice

A transformer layer or residual unit is checkpointed. An embedding table, a norm or a single matrix product is not,
because it saves little but its input anyway. The logits are a separate matter (see `modules/chunked_loss.py`).

Hugging Face's own switch acts in train mode only, so never on frozen layers, and its reentrant variant loses the
gradients of a block above a frozen prefix. Where it is on, reentrant or not, this package's checkpointing replaces it
for as long as a block is active. So no layer is checkpointed twice, and the gradients are right with both variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import nn

from blocktrain.chain.block import Partition
from blocktrain.chain.chain import Chain
from blocktrain.modules.host_boundaries import HostOffload
from blocktrain.modules.recompute import Recomputed
from blocktrain.modules.wrap import wrap_forward

Boundaries = Literal["device", "host"]

# Models whose Hugging Face checkpointing is replaced -> the function that restores it.
_replaced: WeakKeyDictionary[nn.Module, Callable[[], None]] = WeakKeyDictionary()


@contextmanager
def checkpointing(partition: Partition, *, boundaries: Boundaries = "device") -> Iterator[None]:
    """Inside this context, each layer that gradients flow through saves its input only, and is computed again in the
    backward pass.

    partition: the partition of the `BlockOptimizer` whose visits run inside.
    boundaries: where those inputs are stored until then: on the `device`, or on the `host` (in pinned memory with
        CUDA), copied there and back during the computation.

    Gradients are bit-equal to those without checkpointing and with `use_cache=False` (CPU, fp32), also with dropout. A
    forward pass and its backward pass must both be inside. It costs one more forward pass of the layers above the
    prefix, less what the backward pass does not need.

    Where gradients are computed, keys and values are not cached for later tokens: the cache that a model returns is
    empty, as with `use_cache=False`. A layer that reads a filled cache is not checkpointed.
    """
    with _install(partition, boundaries):
        yield


def checkpointed_layers(chain: Chain) -> list[int]:
    """Indices of the layers that `checkpointing` recomputes."""
    return [layer.index for layer in chain.layers if any(map(_has_children, layer.modules.values()))]


def disable_hf_checkpointing(partition: Partition) -> None:
    """Replace Hugging Face's activation checkpointing, if it is on, by this one until `restore_hf_checkpointing`."""
    if partition.model not in _replaced and _hf_checkpointed(partition.model):
        _replaced[partition.model] = _install(partition, "device").close


def restore_hf_checkpointing(partition: Partition) -> None:
    """Undo `disable_hf_checkpointing`, where it replaced anything."""
    restore = _replaced.pop(partition.model, None)
    if restore is not None:
        restore()


def _install(partition: Partition, boundaries: Boundaries) -> ExitStack:
    """Checkpoint the layers, until what this returns is closed."""
    save_input = HostOffload().offloading if boundaries == "host" else None
    modules = [module for layer in partition.chain.layers for module in layer.modules.values() if _has_children(module)]
    undo = ExitStack()
    for module in modules:
        undo.callback(wrap_forward(module, Recomputed(module, save_input)))
    for module in _hf_checkpointed(partition.model):
        module.gradient_checkpointing = False
        undo.callback(setattr, module, "gradient_checkpointing", True)
    return undo


def _has_children(module: nn.Module) -> bool:
    """Whether a module is large enough to be checkpointed: a transformer layer is, a table or a norm is not."""
    return next(module.children(), None) is not None


def _hf_checkpointed(model: nn.Module) -> list[Any]:
    """The modules in which Hugging Face's own checkpointing is on."""
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]

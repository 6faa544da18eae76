"""A module whose activations are computed again in the backward pass: only what goes into it is kept.

                 forward                         backward
    plain        keeps every activation          reads them
    recomputed   keeps its inputs                runs the forward pass again, then reads what that kept

PyTorch's `torch.utils.checkpoint` does the work, without re-entering autograd: what wants a gradient is what the
module's parameters and inputs say at that moment, so a frozen prefix keeps nothing and runs once, and an active block
behind one gets its gradients. It goes around the module (see `around.py`), not into Hugging Face's own switch, which
does nothing in eval mode, where frozen layers run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

Keep = Callable[[Tensor], AbstractContextManager[Any]]
Weigh = Callable[[Callable[[], Any], list[Tensor]], Any]

_weigh: ContextVar[Weigh | None] = ContextVar("weigh", default=None)


class Recomputed:
    """Runs around `module`, whose activations it computes again. See `wrap_forward`.

    keep: where the module's first input stays until then: called with it, a context of saved-tensor hooks; None keeps
        it where it is.

    A call without gradients, or that reads a cache of keys and values, runs as it is. An empty cache is left
    empty: the second run would write into it once more, and nobody reads the cache of a training step.
    """

    def __init__(self, module: nn.Module, keep: Keep | None = None):
        self.module = module
        self.keep = keep

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `run(*args, **kwargs)` returns."""
        args, kwargs, reads_cache = self._without_cache(args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if reads_cache or not self._wants_gradients(tensors):
            return run(*args, **kwargs)
        weigh = _weigh.get()
        if weigh is not None:
            return weigh(lambda: run(*args, **kwargs), tensors)
        with nullcontext() if self.keep is None or not tensors else self.keep(tensors[0]):
            return checkpoint(
                _call,
                run,
                spec,
                *leaves,
                use_reentrant=False,
                # A layer in eval mode draws nothing: no need to note, and to put back, the generators' states.
                preserve_rng_state=any(module.training for module in self.module.modules()),
                context_fn=self._contexts,
            )

    def _wants_gradients(self, inputs: list[Tensor]) -> bool:
        trained = any(parameter.requires_grad for parameter in self.module.parameters())
        return torch.is_grad_enabled() and (trained or any(tensor.requires_grad for tensor in inputs))

    def _without_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any, bool]:
        """The arguments with a cache that holds nothing for this module left out, and whether one that does is left."""
        caches = [value for value in (*args, *kwargs.values()) if hasattr(value, "get_seq_length")]
        if not caches or not torch.is_grad_enabled():
            return args, kwargs, False
        place = next((m.layer_idx for m in self.module.modules() if hasattr(m, "layer_idx")), None)
        if place is None or any(cache.get_seq_length(place) > 0 for cache in caches):
            return args, kwargs, True
        plain = tuple(None if hasattr(value, "get_seq_length") else value for value in args)
        named = {name: None if hasattr(value, "get_seq_length") else value for name, value in kwargs.items()}
        return plain, named, False

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_apart(self.module)


def _call(run: Callable[..., Any], spec: TreeSpec, *leaves: Any) -> Any:
    args, kwargs = tree_unflatten(leaves, spec)
    return run(*args, **kwargs)


@contextmanager
def _statistics_apart(module: nn.Module) -> Iterator[None]:
    """Inside, a BatchNorm in train mode moves copies of its running statistics: the first run has moved its own."""
    moved = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training]
    before = [dict(part._buffers) for part in moved]
    try:
        for part in moved:
            part._buffers.update(
                {name: None if buffer is None else buffer.clone() for name, buffer in part._buffers.items()}
            )
        yield
    finally:
        for part, buffers in zip(moved, before, strict=True):
            part._buffers.update(buffers)


@contextmanager
def weighing(weigh: Weigh) -> Iterator[None]:
    """Inside, nothing is computed again: each call that would be is `weigh(run, tensors that go in)` instead."""
    token = _weigh.set(weigh)
    try:
        yield
    finally:
        _weigh.reset(token)

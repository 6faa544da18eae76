"""Activation checkpointing of one module: only its inputs are kept, and its activations are computed again.

                 forward                         backward
    plain        keeps every activation          reads them
    recomputed   keeps its inputs                runs the forward pass again, then reads what that kept

PyTorch's `torch.utils.checkpoint` does the work, in its non-reentrant form. Whether anything needs a gradient is
decided at each call from the module's parameters and inputs, so a frozen prefix keeps nothing and runs once, and an
active block behind one gets its gradients. The checkpoint is a wrapper around the module (see `wrap.py`) and does not
use Hugging Face's own switch, which does nothing in eval mode, where frozen layers run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

SaveInput = Callable[[Tensor], AbstractContextManager[Any]]  # returns a context of saved-tensor hooks
# Called as measure(run, tensors that go in) in place of a recomputed call; returns what run() returns.
Measure = Callable[[Callable[[], Any], list[Tensor]], Any]

_measure: Measure | None = None  # a plain variable, because `torch.compile` cannot read a context variable


class Recomputed:
    """A wrapper (see `wrap_forward`) that computes the activations of `module` again in the backward pass.

    save_input: decides where the module's first input is kept until then. It is called with that input and returns a
        context of saved-tensor hooks; None keeps the input where it is.

    A call without gradients, or one that reads a filled cache of keys and values, runs as it is. An empty cache is left
    empty, because the second run would write into it again, and nobody reads the cache of a training step.
    """

    def __init__(self, module: nn.Module, save_input: SaveInput | None = None):
        self.module = module
        self.save_input = save_input

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `run(*args, **kwargs)` returns."""
        args, kwargs, reads_cache = self._without_cache(args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        trained = any(parameter.requires_grad for parameter in self.module.parameters())
        needs_gradients = torch.is_grad_enabled() and (trained or any(tensor.requires_grad for tensor in tensors))
        if reads_cache or not needs_gradients:
            return run(*args, **kwargs)
        if _measure is not None:
            return _measure(lambda: run(*args, **kwargs), tensors)

        def run_flat(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, spec)
            return run(*args, **kwargs)

        # `torch.compile` takes no context of ours around the second run, so there is one only where it does something.
        has_statistics = any(isinstance(part, _BatchNorm) and part.training for part in self.module.modules())
        contexts: dict[str, Any] = (
            {"context_fn": lambda: (nullcontext(), _separate_statistics(self.module))} if has_statistics else {}
        )
        with nullcontext() if self.save_input is None or not tensors else self.save_input(tensors[0]):
            return checkpoint(
                run_flat,
                *leaves,
                use_reentrant=False,
                # A layer in eval mode draws no random numbers, so the generators' states need not be saved.
                preserve_rng_state=any(module.training for module in self.module.modules()),
                **contexts,
            )

    def _without_cache(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        """The arguments without any cache that is empty for this module, and whether a filled one is left in them."""
        caches = [value for value in (*args, *kwargs.values()) if hasattr(value, "get_seq_length")]
        if not caches or not torch.is_grad_enabled():
            return args, kwargs, False
        layer = next((m.layer_idx for m in self.module.modules() if hasattr(m, "layer_idx")), None)
        if layer is None or any(cache.get_seq_length(layer) > 0 for cache in caches):
            return args, kwargs, True
        plain = tuple(None if hasattr(value, "get_seq_length") else value for value in args)
        named = {name: None if hasattr(value, "get_seq_length") else value for name, value in kwargs.items()}
        return plain, named, False


@contextmanager
def _separate_statistics(module: nn.Module) -> Iterator[None]:
    """Inside, a BatchNorm in train mode updates copies of its running statistics: the first run has updated its own."""
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training]
    own = [dict(norm._buffers) for norm in norms]
    try:
        for norm in norms:
            norm._buffers.update(
                {name: None if buffer is None else buffer.clone() for name, buffer in norm._buffers.items()}
            )
        yield
    finally:
        for norm, buffers in zip(norms, own, strict=True):
            norm._buffers.update(buffers)


@contextmanager
def measuring_recomputed(measure: Measure) -> Iterator[None]:
    """Inside, nothing is computed again: each call that would be is `measure(run, tensors that go in)` instead."""
    global _measure  # noqa: PLW0603
    before, _measure = _measure, measure
    try:
        yield
    finally:
        _measure = before

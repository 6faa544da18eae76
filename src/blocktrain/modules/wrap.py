"""Something that runs around a module's forward pass: checkpointed activations, weights fetched for the occasion.

    around(module, checkpoint)      module(x) = checkpoint(fetch(forward)(x))
      around(module, fetch)         the last one added is the outermost

A forward hook cannot do this: hooks run outside of what activation checkpointing computes again. The model's code is
untouched, and a copy of the model (see `fake.py`) runs what the model runs, around its own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

Around = Callable[..., Any]  # (run, *args, **kwargs) -> what the module returns; `run` is everything further in


def wrap_forward(module: nn.Module, around: Around) -> Callable[[], None]:
    """Make `module` return `around(run, *args, **kwargs)`, `run` being what it did before; returns what undoes it.

    `around` is copied with the module: let it hold what it needs in attributes, not in a closure.
    """
    forward = module.__dict__.get("forward")
    if not isinstance(forward, _Wrapped):
        forward = _Wrapped(module)
        module.__dict__["forward"] = forward
    forward.wrappers_of.append(around)

    def remove() -> None:
        forward.wrappers_of.remove(around)
        if not forward.wrappers_of and module.__dict__.get("forward") is forward:
            del module.__dict__["forward"]

    return remove


def wrappers_of(module: nn.Module) -> tuple[Around, ...]:
    """What runs around `module`, the outermost last."""
    forward = module.__dict__.get("forward")
    return tuple(forward.wrappers_of) if isinstance(forward, _Wrapped) else ()


def unwrapped(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Nothing around: what a copy of a module gets, where the original's `around` is no concern of it."""
    return run(*args, **kwargs)


@contextmanager
def standing_in(module: nn.Module, tensors: Mapping[str, Any]) -> Iterator[None]:
    """Inside, `module` holds `tensors` under the names of its own parameters."""
    before = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)
    try:
        yield
    finally:
        module._parameters.update(before)


class _Wrapped:
    """Stands in for one module's `forward`."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.wrappers_of: list[Around] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = partial(type(self.module).forward, self.module)
        for around in self.wrappers_of:
            run = partial(around, run)
        return run(*args, **kwargs)

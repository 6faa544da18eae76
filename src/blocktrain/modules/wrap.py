"""Wrappers around a module's forward pass: activation checkpointing, or weights that exist only while the module runs.

    wrap_forward(module, checkpoint)       module(x) = materialize(checkpoint(forward))(x)
      wrap_forward(module, materialize)    the wrapper that was added last is the outermost

A forward hook cannot do this, because hooks run outside of what activation checkpointing computes again. The model's
code stays untouched, and a copy of the model (see `memory/fake.py`) has the same wrappers around its own modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

# Called as wrapper(run, *args, **kwargs), where `run` is everything further in; returns what the module returns.
Wrapper = Callable[..., Any]


def wrap_forward(module: nn.Module, wrapper: Wrapper) -> Callable[[], None]:
    """Make `module` return `wrapper(run, *args, **kwargs)`, where `run` is its forward pass so far.

    Returns a function that removes the wrapper. `copy.deepcopy` of a module copies its wrappers: a wrapper must keep
    what it needs in attributes, not in a closure. A `forward` that another library has set on the module itself (TRL
    computes an output projection in fp32 by one) is wrapped too; a copy has that of the class instead, because the
    other may refer to the original module.
    """
    forward = module.__dict__.get("forward")
    if not isinstance(forward, _WrappedForward):
        forward = _WrappedForward(module, forward)
        module.__dict__["forward"] = forward
    forward.wrappers.append(wrapper)

    def remove() -> None:
        forward.wrappers.remove(wrapper)
        if not forward.wrappers and module.__dict__.get("forward") is forward:
            del module.__dict__["forward"]
            if forward.replaced is not None:
                module.__dict__["forward"] = forward.replaced

    return remove


def wrappers_of(module: nn.Module) -> tuple[Wrapper, ...]:
    """The wrappers around `module`, the outermost last."""
    forward = module.__dict__.get("forward")
    return tuple(forward.wrappers) if isinstance(forward, _WrappedForward) else ()


class NotCopied:
    """Base of a wrapper that makes sense around the original module only: its copy does nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapper:
        return _run_plainly


def _run_plainly(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


@contextmanager
def substituted_parameters(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Inside, `module` computes with `tensors` in place of its own parameters of these names."""
    own = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)  # pyright: ignore[reportArgumentType, reportCallIssue] - tensors, not Parameters
    try:
        yield
    finally:
        module._parameters.update(own)


class _WrappedForward:
    """The `forward` attribute of a module that has wrappers."""

    def __init__(self, module: nn.Module, replaced: Callable[..., Any] | None):
        self.module = module
        self.replaced = replaced  # the module's own attribute before
        self.wrappers: list[Wrapper] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _WrappedForward:
        twin = _WrappedForward(copy.deepcopy(self.module, memo), None)
        twin.wrappers = copy.deepcopy(self.wrappers, memo)
        return twin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.replaced or partial(type(self.module).forward, self.module)
        for wrapper in self.wrappers:
            run = partial(wrapper, run)
        return run(*args, **kwargs)

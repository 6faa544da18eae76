"""Running a model from, or only up to, a boundary between two layers.

    level       0            1          2          3
    chain   [embedding]  [layer 0]  [layer 1]  [layer 2]  [head]
                             |          |
    full run      runs ----> runs ----> runs ----> runs ----> runs
    from level 2  (runs)     passes     h_2 ----> runs ----> runs      h_2 takes the place of what layer 1 passes on
    up to level 2 runs ----> runs ----> h_2 |                          stops before layer 2

Level i is the boundary below layer i. The model's own code runs as it always does, with its masks, positions and
rotary tables; a layer below the boundary hands its input through, and the first layer above it is given the stored
hidden states instead. An embedding still runs: looking rows up costs no FLOPs, and the model's code needs its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.blocks.activation import evaluating
from blocktrain.errors import BlocktrainError
from blocktrain.model.chain import Chain, Layer


class CutError(BlocktrainError):
    """A model cannot be run from a boundary: more than the hidden states crosses it."""


class _Stop(BaseException):
    """Ends a forward pass at a boundary; never leaves this file."""


class Cut:
    """Runs the model of `chain` from and up to levels. Holds no tensors."""

    def __init__(self, chain: Chain):
        self.chain = chain
        self._tuples: dict[nn.Module, int] = {}  # layer module -> length of the tuple it returns, if it returns one

    def bypassed(self, level: int) -> list[Layer]:
        """The layers that do nothing in a run from `level`."""
        return [layer for index, layer in enumerate(self.chain.layers[:level]) if not (index == 0 and _looks_up(layer))]

    @contextmanager
    def running(self, *, level: int = 0, hidden: Tensor | None = None) -> Iterator[None]:
        """Inside, the model runs from `level` on `hidden` (B, ...); level 0 is the model as it is.

        The backward pass belongs inside too: activation checkpointing runs layers again.
        """
        with ExitStack() as stack:
            if level:
                for layer in self.bypassed(level):
                    for module in layer.modules.values():
                        stack.enter_context(_passing_through(module, self._tuples.get(module)))
                entry = self._entry(level)
                handle = entry.register_forward_pre_hook(
                    lambda _module, args, kwargs: _replaced(args, kwargs, hidden), with_kwargs=True
                )
                stack.callback(handle.remove)
            yield

    @torch.no_grad()
    def states(
        self, batch: Mapping[str, Any], levels: Sequence[int], *, level: int = 0, hidden: Tensor | None = None
    ) -> dict[int, Tensor]:
        """Hidden states at `levels` for a batch, from the inputs or from `hidden` at `level`; nothing above the
        highest of them runs."""
        found: dict[int, Tensor] = {}

        def catch(at: int):
            def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                found[at] = _hidden(args, kwargs)
                if at == max(levels):
                    raise _Stop

            return hook

        with self.running(level=level, hidden=hidden), ExitStack() as stack:
            for at in levels:
                handle = self._entry(at).register_forward_pre_hook(catch(at), with_kwargs=True)
                stack.callback(handle.remove)
            try:
                self.chain.model(**batch)
            except _Stop:
                return found
        raise CutError(f"the forward pass of {type(self.chain.model).__name__} did not reach layer {max(levels)}")

    @torch.no_grad()
    def check(self, batch: Mapping[str, Any], level: int) -> None:
        """Compare a run from `level` with the whole run on a (small) batch; raises `CutError` where they differ.

        In eval mode, so that dropout does not differ and no BatchNorm moves. Also learns which layers return tuples.
        """
        with evaluating(self.chain.model):
            self._learn(batch, level)
            whole = _logits(self.chain.model(**batch))
            hidden = self.states(batch, [level])[level]
            with self.running(level=level, hidden=hidden):
                cut = _logits(self.chain.model(**batch))
        if not torch.allclose(whole, cut, rtol=1e-3, atol=1e-3 * float(whole.abs().max())):
            raise CutError(
                f"{type(self.chain.model).__name__} run from layer {self.chain.layers[level].name} differs from the "
                "whole run: more than the hidden states crosses that boundary"
            )

    def _learn(self, batch: Mapping[str, Any], level: int) -> None:
        modules = [module for layer in self.bypassed(level) for module in layer.modules.values()]

        def note(module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, tuple):
                self._tuples[module] = len(output)

        with ExitStack() as stack:
            for module in modules:
                stack.callback(module.register_forward_hook(note).remove)
            self.states(batch, [level])

    def _entry(self, level: int) -> nn.Module:
        """The module that layer `level` runs first."""
        return next(iter(self.chain.layers[level].modules.values()))


def _looks_up(layer: Layer) -> bool:
    return any(isinstance(module, nn.Embedding) for top in layer.modules.values() for module in top.modules())


@contextmanager
def _passing_through(module: nn.Module, length: int | None) -> Iterator[None]:
    """`module` hands its input on: as it is, or as the first of the tuple it would return."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        return hidden if length is None else (hidden, *[None] * (length - 1))

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def _logits(output: Any) -> Tensor:
    return output.logits if hasattr(output, "logits") else output

"""Running a model from, or only up to, a boundary between two layers.

    level       0            1          2          3
    chain   [embedding]  [layer 0]  [layer 1]  [layer 2]  [head]
                             |          |
    full run      runs ----> runs ----> runs ----> runs ----> runs
    from level 2  (looks up) passes     h_2 ----> runs ----> runs      h_2 takes the place of what layer 1 passes on
    up to level 2 runs ----> runs ----> h_2 |                          stops before layer 2
    both (a stage of a pipeline)  h_1 ----> runs ----> h_2 |

Level i is the boundary below layer i. The model's own code runs as it always does, with its masks, positions and
rotary tables; a layer below the boundary hands its input through, and the first layer above it is given the stored
hidden states instead. A table of embeddings is still looked up: that costs no FLOPs, and the model's code needs its
shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.chain.activation import evaluating
from blocktrain.chain.chain import Chain
from blocktrain.errors import BlocktrainError
from blocktrain.modules.chunked_loss import whole_logits


class BoundaryError(BlocktrainError):
    """A model cannot be run from a boundary: more than the hidden states crosses it."""


class _Stop(BaseException):
    """Ends a forward pass at a boundary; never leaves this file."""


class BoundaryRunner:
    """Runs the model of `chain` from and up to levels. Holds no tensors."""

    def __init__(self, chain: Chain):
        self.chain = chain
        self._checked: set[int] = set()  # levels
        self._tuples: dict[nn.Module, int] = {}  # layer module -> length of the tuple it returns, if it returns one

    def bypassed(self, level: int) -> list[nn.Module]:
        """The modules that do nothing in a run from `level`: those of the layers below it, but for embeddings."""
        modules = [list(layer.modules.values()) for layer in self.chain.layers[:level]]
        if modules:
            modules[0] = [module for module in modules[0] if not _looks_up(module)]
        return [module for mine in modules for module in mine]

    @contextmanager
    def running(self, *, level: int = 0, hidden: Tensor | None = None) -> Iterator[None]:
        """Inside, the model runs from `level` on `hidden` (B, ...); level 0 is the model as it is.

        The backward pass belongs inside too: activation checkpointing runs layers again.
        """
        with ExitStack() as stack:
            if level:
                assert hidden is not None, "a run from a boundary needs its hidden states"
                for module in self.bypassed(level):
                    stack.enter_context(pass_through(module, self._tuples.get(module), like=hidden))
                for layer in self.chain.layers[1:level]:  # of the first, what looks embeddings up still runs
                    for module in layer.modules.values():
                        stack.enter_context(_without_hooks(module))
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
        return self._caught(batch, levels, level, hidden)

    def through(
        self, batch: Mapping[str, Any], *, start: int = 0, end: int | None = None, hidden: Tensor | None = None
    ) -> Any:
        """What layers [start, end) make of the inputs, or of `hidden` at `start`: hidden states that can be
        differentiated, or the model's own output where `end` is None."""
        if end is not None:
            return self._caught(batch, [end], start, hidden)[end]
        with self.running(level=start, hidden=hidden):
            return self.chain.model(**batch)

    def _caught(
        self, batch: Mapping[str, Any], levels: Sequence[int], level: int, hidden: Tensor | None
    ) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}

        def catch(at: int):
            def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                found[at] = hidden_of(args, kwargs)
                if at == max(levels):
                    raise _Stop

            return hook

        with self.running(level=level, hidden=hidden), ExitStack() as stack:
            for at in levels:
                handle = self._entry(at).register_forward_pre_hook(catch(at), prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
            try:
                self._begin(batch)
            except _Stop:
                return found
        raise BoundaryError(f"the forward pass of {type(self.chain.model).__name__} did not reach layer {max(levels)}")

    def _begin(self, batch: Mapping[str, Any]) -> None:
        """A forward pass that will be stopped before its end."""
        self.chain.model(**batch)

    @torch.no_grad()
    def check(self, batch: Mapping[str, Any], level: int) -> None:
        """Compare a run from `level` with the whole run on a (small) batch; raises `BoundaryError` where they differ.

        In eval mode, so that dropout does not differ and no BatchNorm moves. Also learns which layers return tuples.
        A level that was found right is not run again: what crosses a boundary is a matter of the model's code.
        """
        if level in self._checked:
            return
        with evaluating(self.chain.model):
            self._learn(batch, level)
            output = self.chain.model(**batch)
            if getattr(output, "aux_loss", None) is not None:
                raise BoundaryError(
                    f"the loss of {type(self.chain.model).__name__} has a part from the routers of all its layers; "
                    "set output_router_logits = false in its configuration, or prefix.store = 'off' and "
                    "distributed.layout = 'data'"
                )
            whole = _results(output)
            hidden = self.states(batch, [level])[level]
            with self.running(level=level, hidden=hidden):
                cut = _results(self.chain.model(**batch))
        if not all(_close(*pair) for pair in zip(whole, cut, strict=True)):
            raise BoundaryError(
                f"{type(self.chain.model).__name__} run from layer {self.chain.layers[level].name} differs from the "
                "whole run: more than the hidden states crosses that boundary"
            )
        self._checked.add(level)

    def _learn(self, batch: Mapping[str, Any], level: int) -> None:
        def note(module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, tuple):
                self._tuples[module] = len(output)

        with ExitStack() as stack:
            for module in self.bypassed(level):
                stack.callback(module.register_forward_hook(note).remove)
            self.states(batch, [level])

    def _entry(self, level: int) -> nn.Module:
        """The module that layer `level` runs first."""
        return next(iter(self.chain.layers[level].modules.values()))


def _looks_up(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Embedding) for part in module.modules())


@contextmanager
def pass_through(module: nn.Module, length: int | None, *, like: Tensor | None = None) -> Iterator[None]:
    """Inside, `module` hands its input on, as the first of a tuple of `length` if it would return one.

    like: of what it hands on only the shape will be looked at, and where it would have made it wider (a projection of
        embeddings), that of `like` is right.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = hidden_of(args, kwargs)
        if like is not None and given.shape != like.shape and given.dim() == like.dim():
            given = torch.zeros_like(like)
        return given if length is None else (given, *[None] * (length - 1))

    before = vars(module).get("forward")  # one that somebody put there, as accelerate does
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Nobody is told of a module that does nothing: its weights, where they are in parts, are not gathered."""
    hooks = (module._forward_pre_hooks, module._forward_hooks)
    before = [dict(of_kind) for of_kind in hooks]
    for of_kind in hooks:
        of_kind.clear()
    try:
        yield
    finally:
        for of_kind, kept in zip(hooks, before, strict=True):
            of_kind.update(kept)


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a layer is called with. Raises `BoundaryError` where that cannot be told."""
    if not args and "hidden_states" not in kwargs:
        raise BoundaryError(
            f"a layer is called with {sorted(kwargs)} by name: its hidden states must be the first positional argument "
            "or be called hidden_states"
        )
    return args[0] if args else kwargs["hidden_states"]


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def _results(output: Any) -> list[Tensor]:
    """What must not change: the logits, and the loss, to which more may belong."""
    if isinstance(output, Tensor):
        return [output]
    results = [result for name in ("logits", "loss") if (result := getattr(output, name, None)) is not None]
    return [whole_logits(result) for result in results]


def _close(whole: Tensor, cut: Tensor) -> bool:
    scale = float(whole.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(whole, cut, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)

"""Running a model from a boundary between two layers, or only up to one.

    boundary       0             1          2          3          4
    chain          | [embedding] |  [h.0]   |  [h.1]   |  [h.2]   |  [head]

    full run         runs -------> runs ----> runs ----> runs ----> runs
    from 2           looks up      passes     runs ----> runs ----> runs     h_2 replaces the input of h.1
    up to 2          runs -------> runs ----> h_2                            stops before h.1
    from 2 to 3      looks up      passes     runs ----> h_3                 a stage of a pipeline

Boundary i lies below layer i of the chain, and h_i are the hidden states there. The model's own code runs as it always
does, with its masks, positions and rotary tables: a layer below the boundary returns its input, and the first layer
above the boundary is given the stored hidden states. Embedding tables are still looked up, which costs no FLOPs,
because the model's code needs the shape of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.chain.chain import Chain
from blocktrain.chain.freezing import evaluating
from blocktrain.errors import BlocktrainError, first_line
from blocktrain.modules.chunked_loss import whole_logits


class BoundaryError(BlocktrainError):
    """A model cannot be run from a boundary: more than the hidden states crosses it."""


class _Stop(BaseException):
    """Ends a forward pass at a boundary. It never leaves this file, and no `except Exception` of a model catches it."""


class BoundaryRunner:
    """Runs the model of `chain` from and up to boundaries. It holds no tensors."""

    def __init__(self, chain: Chain):
        self.chain = chain
        self._checked: set[int] = set()  # boundaries
        self._tuple_lengths: dict[nn.Module, int] = {}  # of layer modules that return a tuple

    def skipped_modules(self, boundary: int) -> list[nn.Module]:
        """The modules that do nothing in a run from `boundary`: those of the layers below it, except embeddings, and
        except the whole first layer where a layer above the boundary reads what it puts out."""
        modules = [list(layer.modules.values()) for layer in self.chain.layers[:boundary]]
        if modules and any(source == 0 and reader >= boundary for source, reader in self.chain.reads):
            modules[0] = []
        elif modules:
            modules[0] = [
                module for module in modules[0] if not any(isinstance(part, nn.Embedding) for part in module.modules())
            ]
        return [module for of_layer in modules for module in of_layer]

    @contextmanager
    def running(self, *, start: int = 0, hidden: Tensor | None = None) -> Iterator[None]:
        """Inside this context the model runs from boundary `start` on the states `hidden` (B, ...) there; from boundary
        0 it runs as it is.

        The backward pass belongs inside too: activation checkpointing runs layers again.
        """
        with ExitStack() as stack:
            if start:
                assert hidden is not None, "a run from a boundary needs its hidden states"
                for module in self.skipped_modules(start):
                    stack.enter_context(pass_through(module, self._tuple_lengths.get(module), like=hidden))
                for layer in self.chain.layers[1:start]:  # not the first layer, whose embeddings still run
                    for module in layer.modules.values():
                        stack.enter_context(_without_hooks(module))

                def replace_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

                handle = self._entry(start).register_forward_pre_hook(replace_input, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    @torch.no_grad()
    def states(
        self, batch: Mapping[str, Any], boundaries: Sequence[int], *, start: int = 0, hidden: Tensor | None = None
    ) -> dict[int, Tensor]:
        """The hidden states of a batch at each of `boundaries`, without gradients, computed from the inputs or from
        `hidden` at boundary `start`. Layers above the highest boundary do not run."""
        return self._run_up_to(batch, boundaries, start, hidden)

    def run(
        self, batch: Mapping[str, Any], *, start: int = 0, end: int | None = None, hidden: Tensor | None = None
    ) -> Any:
        """What layers [start, end) compute from the inputs, or from `hidden` at boundary `start`: hidden states that
        can be differentiated, or the model's own output where `end` is None."""
        if end is not None:
            return self._run_up_to(batch, [end], start, hidden)[end]
        with self.running(start=start, hidden=hidden):
            return self.chain.model(**batch)

    def _run_up_to(
        self, batch: Mapping[str, Any], boundaries: Sequence[int], start: int, hidden: Tensor | None
    ) -> dict[int, Tensor]:
        states: dict[int, Tensor] = {}
        highest = max(boundaries)

        def catch(boundary: int):
            def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                states[boundary] = hidden_of(args, kwargs)
                if boundary == highest:
                    raise _Stop

            return hook

        with self.running(start=start, hidden=hidden), ExitStack() as stack:
            for boundary in boundaries:
                entry = self._entry(boundary)
                handle = entry.register_forward_pre_hook(catch(boundary), prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
            try:
                self._run_until_stopped(batch)
            except _Stop:
                return states
        raise BoundaryError(f"the forward pass of {type(self.chain.model).__name__} did not reach layer {highest}")

    def _run_until_stopped(self, batch: Mapping[str, Any]) -> None:
        """A forward pass that a `_Stop` ends before the model does; a sharded model begins it differently."""
        self.chain.model(**batch)

    @torch.no_grad()
    def check(self, batch: Mapping[str, Any], boundary: int) -> None:
        """Compare a run from `boundary` with the full run on a (small) batch; raises `BoundaryError` where they differ.

        The comparison runs in eval mode, so that dropout does not differ and no BatchNorm moves. It also finds out
        which layers return tuples. A boundary that has passed is not checked again: what crosses it depends on the
        model's code alone.
        """
        if boundary in self._checked:
            return
        self._require_nothing_crosses(boundary, from_layer=1)

        def note_tuple(module: nn.Module, _args: object, output: object) -> None:
            if isinstance(output, tuple):
                self._tuple_lengths[module] = len(output)

        with evaluating(self.chain.model):
            with ExitStack() as stack:
                for module in self.skipped_modules(boundary):
                    stack.callback(module.register_forward_hook(note_tuple).remove)
                self.states(batch, [boundary])
            output = self.chain.model(**batch)
            if getattr(output, "aux_loss", None) is not None:
                raise BoundaryError(
                    f"the loss of {type(self.chain.model).__name__} has a part from the routers of all its layers; "
                    "set output_router_logits = false in its configuration, or prefix.store = 'off' and "
                    "distributed.layout = 'data'"
                )
            full = _results(output)
            hidden = self.states(batch, [boundary])[boundary]
            try:
                with self.running(start=boundary, hidden=hidden):
                    from_boundary = _results(self.chain.model(**batch))
            except Exception as error:  # the full run did not raise it
                raise BoundaryError(
                    f"{type(self.chain.model).__name__} cannot be run from layer {self.chain.layers[boundary].name} "
                    f"({type(error).__name__}: {first_line(error)}): more than the hidden states crosses that boundary"
                ) from error
        for expected, found in zip(full, from_boundary, strict=True):
            scale = float(expected.nan_to_num(0, 0, 0).abs().max())
            if not torch.allclose(expected, found, rtol=1e-3, atol=1e-3 * scale, equal_nan=True):
                raise BoundaryError(
                    f"{type(self.chain.model).__name__} run from layer {self.chain.layers[boundary].name} differs from "
                    "the full run: more than the hidden states crosses that boundary"
                )
        self._checked.add(boundary)

    def require_own_inputs(self, boundary: int) -> None:
        """Raises `BoundaryError` unless the layers above `boundary` read nothing but the hidden states there. `check`
        lets them read what the first layer puts out, because it can be computed again while that layer is frozen."""
        self._require_nothing_crosses(boundary, from_layer=0)

    def _require_nothing_crosses(self, boundary: int, *, from_layer: int) -> None:
        for source, reader in sorted(self.chain.reads):
            if from_layer <= source < boundary <= reader:
                layers = self.chain.layers
                raise BoundaryError(
                    f"'{layers[reader].name}' of {type(self.chain.model).__name__} reads what '{layers[source].name}' "
                    f"puts out, which crosses the boundary below '{layers[boundary].name}'; set prefix.store = 'off' "
                    "and distributed.layout = 'data'"
                )

    def _entry(self, boundary: int) -> nn.Module:
        """The module that the layer above `boundary` runs first."""
        return next(iter(self.chain.layers[boundary].modules.values()))


@contextmanager
def pass_through(module: nn.Module, tuple_length: int | None, *, like: Tensor | None = None) -> Iterator[None]:
    """Inside this context `module` returns its input, as the first of a tuple of `tuple_length` if one is given.

    like: only the output's shape is used; where `module` would change it (a projection of embeddings), the output is
        zeros of this tensor's shape.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = hidden_of(args, kwargs)
        if like is not None and output.shape != like.shape and output.dim() == like.dim():
            output = torch.zeros_like(like)
        return output if tuple_length is None else (output, *[None] * (tuple_length - 1))

    before = vars(module).get("forward")  # another library may have replaced it on the instance, as accelerate does
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Inside this context no forward hook of `module` fires. It does nothing there, so FSDP need not all-gather its
    weights."""
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
    """The hidden states that a layer is called with; raises `BoundaryError` where its arguments do not tell."""
    if not args and "hidden_states" not in kwargs:
        raise BoundaryError(
            f"a layer is called with {sorted(kwargs)} by name: its hidden states must be the first positional argument "
            "or be called hidden_states"
        )
    return args[0] if args else kwargs["hidden_states"]


def _results(output: Any) -> list[Tensor]:
    """What a run from a boundary must not change: the logits, and the loss, which may depend on more than them."""
    if isinstance(output, Tensor):
        return [output]
    results = [result for name in ("logits", "loss") if (result := getattr(output, name, None)) is not None]
    return [whole_logits(result) for result in results]

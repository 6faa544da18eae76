"""Weights of frozen layers between their uses: quantized, on the host, or both; materialized while their layer runs.

    at rest      the parameter is one NaN (see `modules/placeholder.py`), what holds its value is here
    runs         around the layer's module: its weights, unpacked into new tensors, stand in for the parameters

                   layer i - 1     layer i     layer i + 1
    OnDevice         packed         awake        packed
    OnHost            host          awake      on its way        forward; in a backward pass, of layer i - 1

Standing in means that the module holds another tensor under the parameter's name while it runs. What autograd keeps
of it for the backward pass of a frozen tail is that tensor, so gradients are right whatever becomes of the parameter.
Activation checkpointing around the layer is what keeps autograd from keeping it: then at most two layers are awake.
Nothing is ever written back: frozen weights do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.chain.chain import Chain
from blocktrain.errors import ConfigError
from blocktrain.modules.placeholder import is_placeholder, replace_by_placeholder, restore_value
from blocktrain.modules.wrap import unwrapped, wrap_forward
from blocktrain.optim.precision import Format
from blocktrain.optim.quantize import Quantized, quantize
from blocktrain.runtime import SideStream


@dataclass(frozen=True)
class OnDevice:
    """Frozen weights stay on the device."""


@dataclass(frozen=True)
class OnHost:
    """Frozen weights stay in host memory and are copied to the device as the layers run, one layer ahead.

    side_stream: makes the copies; another class than the default counts them (`runtime.AlwaysCopying`).
    """

    side_stream: type[SideStream] = SideStream


FrozenPlace = OnDevice | OnHost


@dataclass(frozen=True, eq=False)
class _Offloaded:
    value: Tensor  # in the compute dtype, on the host
    packed: Quantized  # what is materialized


class OffloadedWeights:
    """Holds the matrices of a model's frozen layers. Vectors (norms, biases) are too small to be worth it.

    Host memory: 2 bytes a resting weight in bf16, and under `OnHost` its packed form. Device memory: the packed form
    under `OnDevice`; beside it the layer that runs, and under `OnHost` the copy of the one that follows.
    """

    def __init__(self, chain: Chain, form: Format, place: FrozenPlace):
        self._form: Format = form
        self._place = place
        self._model = chain.model
        self._offloaded: dict[nn.Parameter, _Offloaded] = {}
        self._units: list[list[nn.Parameter]] = []  # by number: matrices of one module of the chain, in forward order
        self._coming: dict[int, dict[nn.Parameter, tuple[Tensor, ...]]] = {}  # on the device, by unit: at most two
        self._order: list[int] = []  # units at rest
        self._last, self._up = -1, True  # where in that order the model was, and where it was going
        self._undo: list[Callable[[], object]] = []
        self._side: SideStream | None = None
        if form in ("int8", "nf4") or isinstance(place, OnHost):
            self._surround(chain)

    def _surround(self, chain: Chain) -> None:
        for parameter in chain.model.parameters():
            if is_placeholder(parameter):
                raise ConfigError("the model's weights rest with another BlockOptimizer; close() that one first")
        for layer in chain.layers:
            for module in layer.modules.values():
                uses = list(_matrices(module))
                self._undo.append(wrap_forward(module, _Materialize(self, len(self._units), uses)))
                self._units.append(list({id(use.parameter): use.parameter for use in uses}.values()))
        hook = chain.model.register_state_dict_post_hook(_TrueWeights(self))
        self._undo.append(hook.remove)
        side_stream = self._place.side_stream if isinstance(self._place, OnHost) else SideStream
        self._side = side_stream(next(chain.model.parameters()).device)

    # -- rest and wake --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def offload(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put away those of `parameters` that a module can be given as it runs."""
        if self._side is None:
            return
        for parameter in parameters:
            if parameter.ndim >= 2 and not is_placeholder(parameter):
                self._put_away(parameter, parameter.data)
        self._forget_order()

    def _put_away(self, parameter: nn.Parameter, value: Tensor) -> None:
        assert self._side is not None
        packed = quantize(value.to(parameter.device), self._form)
        on_host = self._side.pinned(value)
        if isinstance(self._place, OnHost):
            unwrapped = self._form in ("fp32", "bf16")
            parts = (on_host,) if unwrapped else tuple(self._side.pinned(part) for part in packed.parts)
            packed = Quantized(packed.format, packed.shape, packed.dtype, parts)
        self._offloaded[parameter] = _Offloaded(on_host, packed)
        replace_by_placeholder(parameter, packed.parts)

    @torch.no_grad()
    def materialize(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give `parameters` their own values back, on their device: a block becomes active, or the run is over."""
        for parameter in parameters:
            rested = self._offloaded.pop(parameter, None)
            if rested is not None:
                restore_value(parameter, rested.value.to(parameter.device, copy=True))
        self._forget_order()

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The value of `parameter` before it was packed, on the host; not to be changed."""
        rested = self._offloaded.get(parameter)
        return parameter.data.cpu() if rested is None else rested.value

    @torch.no_grad()
    def replace(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Put `value` in the place of what `parameter` was, at rest or awake."""
        if parameter in self._offloaded:
            self._put_away(parameter, value.to(parameter.dtype, copy=True))
            self._forget_order()
        else:
            parameter.copy_(value)

    def close(self) -> None:
        """Wake everything and leave the model as it would be without."""
        self.materialize(list(self._offloaded))
        while self._undo:
            self._undo.pop()()

    def device_bytes(self, parameter: nn.Parameter) -> int:
        """What `parameter` takes on its device while it is frozen."""
        if self._side is None or parameter.ndim < 2:
            return parameter.nbytes
        if isinstance(self._place, OnHost):
            return 0
        return sum(part.nbytes for part in quantize(torch.empty_like(parameter, device="meta"), self._form).parts)

    def tensors(self) -> dict[str, list[Tensor]]:
        """What is held: packed on the device ("frozen") or on the "host"; copies on their way are frozen, too."""
        on_host = isinstance(self._place, OnHost)
        packed = [part for rested in self._offloaded.values() for part in rested.packed.parts]
        coming = [part for unit in self._coming.values() for parts in unit.values() for part in parts]
        values = [rested.value for rested in self._offloaded.values()]
        return {"frozen": coming if on_host else packed, "host": [*values, *packed] if on_host else values}

    # -- as the model runs ----------------------------------------------------------------------------------------

    def materialized(self, unit: int) -> dict[nn.Parameter, Tensor]:
        """New tensors with the values of a unit's resting weights; what the next unit needs is on its way after."""
        if self._side is None or not any(parameter in self._offloaded for parameter in self._units[unit]):
            return {}
        # What is made in inference mode could not be kept for a backward pass later.
        with torch.inference_mode(False), torch.no_grad():
            parts = self._coming.pop(unit, None) or self._fetch(unit)
            self._side.join()
            if isinstance(self._place, OnHost):
                following = self._following(unit)
                coming = {at: self._coming.get(at) for at in following}
                self._coming = {unit: parts}
                self._coming.update({at: found or self._fetch(at) for at, found in coming.items()})
            return {parameter: self._offloaded[parameter].packed.dequantize(mine) for parameter, mine in parts.items()}

    def _fetch(self, unit: int) -> dict[nn.Parameter, tuple[Tensor, ...]]:
        """Start to copy a unit's packed weights to the device."""
        side = self._side
        assert side is not None
        return {
            parameter: tuple(side.to_device(part) for part in self._offloaded[parameter].packed.parts)
            for parameter in self._units[unit]
            if parameter in self._offloaded
        }

    def _following(self, unit: int) -> list[int]:
        """The unit that will run next: the one above in a forward pass, below where a backward pass computes again.

        A pass turns at the unit where the one before it ended; any jump is the start of a forward pass.
        """
        if not self._order:
            self._order = [at for at, mine in enumerate(self._units) if any(p in self._offloaded for p in mine)]
            self._last = -1
        place = self._order.index(unit)
        if place == self._last:
            self._up = not self._up
        else:
            self._up = place != self._last - 1
        self._last = place
        following = place + (1 if self._up else -1)
        return [self._order[following]] if 0 <= following < len(self._order) else []

    def _forget_order(self) -> None:
        if self._side is not None:
            self._side.join()  # no copy may be under way into memory that is given back
        self._coming, self._order = {}, []


@dataclass(frozen=True)
class _Use:
    """Where a module holds a parameter."""

    owner: nn.Module
    attribute: str
    parameter: nn.Parameter


def _matrices(module: nn.Module) -> Iterator[_Use]:
    for owner in module.modules():
        for attribute, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.ndim >= 2:
                yield _Use(owner, attribute, parameter)


@dataclass(frozen=True, eq=False)
class _Materialize:
    """Around one module of the chain: its resting weights are awake while it runs."""

    resting: OffloadedWeights
    unit: int
    uses: list[_Use]

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _standing_in(self.resting.materialized(self.unit), self.uses):
            return run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copy of the model without memory has nothing to wake."""
        return unwrapped


@contextmanager
def _standing_in(materialized: dict[nn.Parameter, Tensor], uses: Iterable[_Use]) -> Iterator[None]:
    standing = [use for use in uses if use.parameter in materialized]
    for use in standing:
        use.owner._parameters[use.attribute] = materialized[use.parameter]  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for use in standing:
            use.owner._parameters[use.attribute] = use.parameter


@dataclass(eq=False)
class _TrueWeights:
    """Makes `model.state_dict()` hold what resting weights stand for, on the host."""

    resting: OffloadedWeights

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if is_placeholder(parameter) and prefix + name in state:
                state[prefix + name] = self.resting.value(parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any) -> None:
    """In a copy of the model without memory."""

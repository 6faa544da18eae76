"""Stores the weights of frozen layers quantized, on the host, or both, and rebuilds a layer's weights while it runs.

    stored       the parameter is a placeholder (see `modules/placeholder.py`); the tensors that hold its value are here
    layer runs   a wrapper around the layer's module materializes its weights: it makes new tensors, with which the
                 module computes in place of its parameters
    active       the parameter has its own value again

                   layer i - 1     layer i          layer i + 1
    OnDevice        quantized      materialized      quantized
    OnHost           host          materialized      being copied      (in a backward pass: layer i - 1 is being copied)

In a frozen tail autograd saves the materialized tensor for the backward pass, so gradients are right whatever happens
to the parameter in the meantime. With activation checkpointing around the layer autograd saves none of them, and then
at most two layers are materialized at a time. Nothing is written back, because frozen weights do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.chain.chain import Chain
from blocktrain.errors import ConfigError
from blocktrain.modules.int8_linear import Int8Layers, Int8Weight
from blocktrain.modules.placeholder import is_placeholder, replace_by_placeholder, restore_value
from blocktrain.modules.wrap import NotCopied, substituted_parameters, wrap_forward
from blocktrain.optim.precision import Format
from blocktrain.optim.quantize_weights import Quantized, quantize
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


WeightLocation = OnDevice | OnHost  # where the weights of frozen layers are stored


@dataclass(frozen=True, eq=False)
class _StoredWeight:
    value: Tensor  # in the compute dtype, on the host
    quantized: Quantized | Int8Weight  # what is materialized; on the device, or under `OnHost` on the host


class WeightStore:
    """Stores the matrices of a model's frozen layers. Vectors (norms, biases) are too small to be worth it.

    With `OnDevice` and a format of 16 or 32 bits there is nothing to do: weights stay in their parameters.

    device: where the model computes; by default where its weights are. Weights elsewhere go there as they are stored,
        one at a time.

    Host memory: 2 bytes a weight in bf16, and under `OnHost` its quantized form. Device memory: under `OnDevice` the
    quantized form; in addition the layer that runs, and under `OnHost` the copy of the layer that follows.

    int8: linear layers that compute in int8 while they are frozen. In the format "int8" the copies that they compute
        with are all that is stored of their weights, and are not materialized for them. Not for `OnHost`.
    """

    def __init__(
        self,
        chain: Chain,
        form: Format,
        location: WeightLocation,
        device: torch.device | None = None,
        int8: Int8Layers | None = None,
    ):
        self._form: Format = form
        self._location = location
        self._device = device
        self._int8 = int8
        self._stored: dict[nn.Parameter, _StoredWeight] = {}
        self._units: list[list[nn.Parameter]] = []  # the matrices of each module of the chain, in forward order
        self._prefetched: dict[int, dict[nn.Parameter, tuple[Tensor, ...]]] = {}  # on the device; at most two units
        self._order: list[int] = []  # the units that have stored weights; computed when it is needed
        self._last, self._up = -1, True  # the place in that order that ran last, and the direction of the pass
        self._undo: list[Callable[[], object]] = []
        self._side: SideStream | None = None  # None: nothing is ever stored here
        self._forward_passes = 0  # of the whole model that run now, one inside the other
        self._read: dict[nn.Parameter, Tensor] = {}  # what such a pass has read outside of the weight's layer
        if form not in ("int8", "nf4") and isinstance(location, OnDevice):
            return
        if any(is_placeholder(parameter) for parameter in chain.model.parameters()):
            raise ConfigError("the model's weights are offloaded by another BlockOptimizer; close() that one first")
        for layer in chain.layers:
            for module in layer.modules.values():
                matrices: dict[nn.Module, dict[str, nn.Parameter]] = {}  # by owner and attribute name
                for owner in module.modules():
                    named = owner.named_parameters(recurse=False, remove_duplicate=False)
                    matrices[owner] = {name: parameter for name, parameter in named if parameter.ndim >= 2}
                matrices = {owner: mine for owner, mine in matrices.items() if mine}
                self._undo.append(wrap_forward(module, _MaterializeUnit(self, len(self._units), matrices)))
                self._units.append(list(dict.fromkeys(p for mine in matrices.values() for p in mine.values())))
        self._names = {parameter: name for name, parameter in chain.model.named_parameters()}
        self._undo.append(chain.model.register_state_dict_post_hook(_StateDictHook(self)).remove)
        self._undo.append(chain.model.register_forward_pre_hook(_ForwardHook(self, 1), prepend=True).remove)
        self._undo.append(chain.model.register_forward_hook(_ForwardHook(self, -1), always_call=True).remove)
        side_stream = location.side_stream if isinstance(location, OnHost) else SideStream
        self._side = side_stream(device or next(chain.model.parameters()).device)

    # -- store and restore ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def store(self, parameters: Iterable[nn.Parameter]) -> None:
        """Store the matrices among `parameters`, which leaves placeholders: a block is frozen."""
        if self._side is None:
            return
        for parameter in parameters:
            if parameter.ndim >= 2 and not is_placeholder(parameter):
                self._put(parameter, parameter.data)
        self._forget_prefetched()

    @torch.no_grad()
    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give `parameters` their own values back, on their device: a block becomes active, or the run is over."""
        for parameter in parameters:
            stored = self._stored.pop(parameter, None)
            if stored is not None:
                restore_value(parameter, stored.value.to(parameter.device, copy=True))
        self._forget_prefetched()

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The value of `parameter` before it was quantized, on the host; must not be changed."""
        stored = self._stored.get(parameter)
        return parameter.data.cpu() if stored is None else stored.value

    @torch.no_grad()
    def replace(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Give `parameter` another value, whether it is stored here or not."""
        if parameter in self._stored:
            self._put(parameter, value.to(parameter.dtype, copy=True))
            self._forget_prefetched()
        else:
            parameter.copy_(value)

    def close(self) -> None:
        """Restore everything and remove the wrappers: the model is an ordinary one again."""
        self.restore(list(self._stored))
        while self._undo:
            self._undo.pop()()

    def _put(self, parameter: nn.Parameter, value: Tensor) -> None:
        assert self._side is not None
        device, is_quantized = self._device or parameter.device, self._form in ("int8", "nf4")
        given = value.to(device) if is_quantized else value
        if isinstance(self._location, OnDevice):
            on_host = value.cpu()
            if self._int8 is not None and parameter in self._int8.parameters:
                quantized = self._int8.put(parameter, given)
            else:
                quantized = quantize(given, self._form)
        else:
            quantized = quantize(given, self._form)
            on_host = self._side.pinned(value)
            parts = tuple(map(self._side.pinned, quantized.parts)) if is_quantized else (on_host,)
            quantized = replace(quantized, parts=parts)
        self._stored[parameter] = _StoredWeight(on_host, quantized)
        read = partial(self._read_now, parameter)
        replace_by_placeholder(parameter, quantized.parts, self._names[parameter], read, device=device)

    # -- accounting -----------------------------------------------------------------------------------------------

    def device_bytes(self, parameter: nn.Parameter) -> int:
        """Device memory of `parameter` while it is frozen."""
        if self._side is None or parameter.ndim < 2:
            return parameter.nbytes
        if isinstance(self._location, OnHost):
            return 0
        if self._int8 is not None and parameter in self._int8.parameters:
            return self._int8.nbytes(parameter)
        return sum(part.nbytes for part in quantize(torch.empty_like(parameter, device="meta"), self._form).parts)

    def tensors(self) -> dict[str, list[Tensor]]:
        """All tensors stored here: "frozen" are those on the device, with prefetched copies; "host" the others."""
        values = [stored.value for stored in self._stored.values()]
        quantized = [part for stored in self._stored.values() for part in stored.quantized.parts]
        if isinstance(self._location, OnDevice):
            return {"frozen": quantized, "host": values}
        prefetched = [part for unit in self._prefetched.values() for parts in unit.values() for part in parts]
        return {"frozen": prefetched, "host": [*values, *quantized]}

    # -- as the model runs ----------------------------------------------------------------------------------------

    def materialize_unit(self, unit: int) -> dict[nn.Parameter, Tensor]:
        """New tensors with the values of a unit's stored weights. Under `OnHost` the next unit is prefetched."""
        if self._side is None or not any(self._is_materialized(parameter) for parameter in self._units[unit]):
            return {}
        # A tensor made in inference mode could not be saved for a later backward pass.
        with torch.inference_mode(False), torch.no_grad():
            parts = self._prefetched.pop(unit, None) or self._fetch(unit)
            self._side.join()
            if isinstance(self._location, OnHost):
                following = self._next_unit(unit)
                on_its_way = None if following is None else self._prefetched.get(following)
                self._prefetched = {unit: parts}  # older copies are freed before another one is made
                if following is not None:
                    self._prefetched[following] = on_its_way or self._fetch(following)
            return {p: self._stored[p].quantized.dequantize(mine) for p, mine in parts.items()}

    def forward_passes(self, change: int) -> None:
        """A forward pass of the whole model begins (`change` is 1) or ends (-1)."""
        self._forward_passes += change
        if not self._forward_passes:
            self._read = {}

    def _read_now(self, parameter: nn.Parameter) -> Tensor | None:
        """The value, on the device, of a stored weight that something reads outside of its layer's run (a fused loss)
        in a forward pass of the whole model or in a backward pass; None at other times."""
        in_backward = torch._C._current_graph_task_id() != -1
        if not self._forward_passes and not in_backward:
            return None
        if parameter in self._read:
            return self._read[parameter]
        assert self._side is not None
        with torch.inference_mode(False), torch.no_grad():
            quantized = self._stored[parameter].quantized
            parts = tuple(self._side.to_device(part) for part in quantized.parts)
            self._side.join()
            value = quantized.dequantize(parts)
        if self._forward_passes:  # a loss in chunks reads it once for each of them
            self._read[parameter] = value
        return value

    def _fetch(self, unit: int) -> dict[nn.Parameter, tuple[Tensor, ...]]:
        """Start to copy a unit's quantized weights to the device."""
        side = self._side
        assert side is not None
        return {
            parameter: tuple(side.to_device(part) for part in self._stored[parameter].quantized.parts)
            for parameter in self._units[unit]
            if self._is_materialized(parameter)
        }

    def _is_materialized(self, parameter: nn.Parameter) -> bool:
        computes_as_stored = self._int8 is not None and self._int8.is_on and parameter in self._int8.weights
        return parameter in self._stored and not computes_as_stored

    def _next_unit(self, unit: int) -> int | None:
        """The unit that will run next: the one above in a forward pass, the one below where a backward pass recomputes.

        A pass turns at the unit where the pass before it ended. Any jump is the start of a forward pass.
        """
        if not self._order:
            self._order = [at for at, mine in enumerate(self._units) if any(p in self._stored for p in mine)]
            self._last = -1
        place = self._order.index(unit)
        if place == self._last:
            self._up = not self._up
        else:
            self._up = place != self._last - 1
        self._last = place
        following = place + (1 if self._up else -1)
        return self._order[following] if 0 <= following < len(self._order) else None

    def _forget_prefetched(self) -> None:
        """The set of stored weights has changed: drop the copies and the order of units."""
        if self._side is not None:
            self._side.join()  # no copy may be under way into memory that is freed
        self._prefetched, self._order = {}, []


@dataclass(frozen=True, eq=False)
class _MaterializeUnit(NotCopied):
    """The wrapper around one module of the chain: its stored weights are materialized while it runs. A copy of the
    model has no memory, and nothing to materialize."""

    store: WeightStore
    unit: int
    matrices: dict[nn.Module, dict[str, nn.Parameter]]

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values = self.store.materialize_unit(self.unit)
        with ExitStack() as stack:
            for owner, parameters in self.matrices.items():
                materialized = {attribute: values[p] for attribute, p in parameters.items() if p in values}
                stack.enter_context(substituted_parameters(owner, materialized))
            return run(*args, **kwargs)


@dataclass(eq=False)
class _ForwardHook:
    """Tells the store when forward passes of the whole model begin and end."""

    store: WeightStore
    change: int

    def __call__(self, *_: Any) -> None:
        self.store.forward_passes(self.change)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """A copy of the model has no stored values."""
        return lambda *_: None


@dataclass(eq=False)  # not frozen: PyTorch sets an attribute of a hook
class _StateDictHook:
    """Makes `model.state_dict()` hold the values of stored weights, on the host."""

    store: WeightStore

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if is_placeholder(parameter) and prefix + name in state:
                state[prefix + name] = self.store.value(parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """A copy of the model has no stored values."""
        return lambda *_: None

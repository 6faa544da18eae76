"""Tensors that wait for the backward pass in host memory, and are back on the device before it needs them.

    forward    layer 0 | layer 1 | layer 2          h_i: what goes into layer i
    copies     h_0 >>>   h_1 >>>   h_2 >>>          device to host, beside the computation
    copies                    <<< h_1  <<< h_0      host to device: asking for h_2 starts h_1
    backward             layer 2 | layer 1 | layer 0

On CUDA the copies run on a stream of their own, through pinned memory. On a CPU the same code copies at once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class HostMemory:
    """Keeps tensors on the host, each fetched when the one kept after it is asked for."""

    def __init__(self) -> None:
        self._last: weakref.ref[_Away] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> HostMemory:
        return HostMemory()  # a copy of the model keeps its own

    def keeping(self, tensor: Tensor) -> saved_tensors_hooks:
        """A context in which autograd keeps `tensor` on the host; what else it saves stays where it is, and is not seen
        by hooks further out either."""
        storage = tensor.untyped_storage()._cdata

        def pack(saved: Tensor) -> Tensor | _Away:
            return self._send(saved) if saved.untyped_storage()._cdata == storage else saved

        return saved_tensors_hooks(pack, lambda kept: kept.take() if isinstance(kept, _Away) else kept)

    def _send(self, tensor: Tensor) -> _Away:
        before = None if self._last is None else self._last()
        away = _Away(tensor, self._stream(tensor.device), before)
        self._last = weakref.ref(away)
        return away

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Away:
    """One tensor on the host. `before` is the one kept before it, which the backward pass needs next."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream | None, before: _Away | None):
        self._device = tensor.device
        self._stream = stream  # None on a CPU, where `torch.cuda.stream(None)` does nothing
        self._before = None if before is None else weakref.ref(before)
        self._fetched: Tensor | None = None
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            tensor.record_stream(stream)  # its memory is not used again before it is copied
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)

    def fetch(self) -> None:
        """Start copying back."""
        if self._fetched is None:
            with torch.cuda.stream(self._stream):
                self._fetched = self._host.to(self._device, non_blocking=True, copy=True)

    def take(self) -> Tensor:
        """The tensor on its device, whole for what is queued there from now on."""
        self.fetch()
        tensor, self._fetched = self._fetched, None
        assert tensor is not None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            tensor.record_stream(current)
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        return tensor

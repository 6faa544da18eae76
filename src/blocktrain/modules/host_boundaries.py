"""Tensors that autograd saves for the backward pass, offloaded to host memory and prefetched before they are needed.

    forward    layer 0 | layer 1 | layer 2          h_i: the input of layer i
    copies     h_0 >>>   h_1 >>>   h_2 >>>          device to host, at the same time as the computation
    copies                    <<< h_1  <<< h_0      host to device: taking h_2 starts the copy of h_1
    backward             layer 2 | layer 1 | layer 0

On CUDA the copies run on a stream of their own, through page-locked memory. On a CPU the same code copies at once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from blocktrain.runtime import SideStream


class HostOffload:
    """Offloads saved tensors; taking one back starts to fetch the one that was offloaded before it."""

    def __init__(self) -> None:
        self._last: weakref.ref[_HostCopy] | None = None
        self._sides: dict[torch.device, SideStream] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> HostOffload:
        return HostOffload()  # a copy of the model has copies of its own

    def offloading(self, tensor: Tensor) -> saved_tensors_hooks:
        """A context in which autograd saves `tensor` on the host. Whatever else it saves stays where it is, and is
        hidden from saved-tensor hooks further out."""
        storage = tensor.untyped_storage()._cdata

        def pack(saved: Tensor) -> Tensor | _HostCopy:
            if saved.untyped_storage()._cdata != storage:
                return saved
            if saved.device not in self._sides:
                self._sides[saved.device] = SideStream(saved.device)
            before = None if self._last is None else self._last()
            copy = _HostCopy(saved, self._sides[saved.device], before)
            self._last = weakref.ref(copy)
            return copy

        return saved_tensors_hooks(pack, lambda saved: saved.take() if isinstance(saved, _HostCopy) else saved)


class _HostCopy:
    """One tensor on the host. `before` is the one offloaded before it, which the backward pass needs next."""

    def __init__(self, tensor: Tensor, side: SideStream, before: _HostCopy | None):
        self._side = side
        self._before = None if before is None else weakref.ref(before)
        self._fetched: Tensor | None = None
        self._host = side.to_host(tensor, is_kept=False)

    def fetch(self) -> None:
        """Start to copy the tensor back to its device."""
        if self._fetched is None:
            self._fetched = self._side.to_device(self._host)

    def take(self) -> Tensor:
        """The tensor on its device, complete for all work queued on the current stream from now on."""
        self.fetch()
        tensor, self._fetched = self._fetched, None
        assert tensor is not None
        self._side.join()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        return tensor

    def __del__(self) -> None:
        if self._fetched is not None:  # nobody took it, and the copy may be on its way into memory that is freed now
            self._side.join()

"""Copies between host and device on CPU tensors, as they are on a card: under way until their stream was waited for.

`Streams` is a dispatch mode that knows each copy of a `SideStream` and sees every operation. It raises
`TooEarlyError` where a card would compute with wrong numbers:

    a copy on the device    is read, written or freed before the computation joined the side stream
    a copy on the host      is read or written before the host waited for the side stream
    a source on the device  is written before either, or freed without `record_stream`
    a source on the host    is written before the host waited (its memory, once locked, is freed only after a wait)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from blocktrain.modules.dispatch import EagerDispatchMode
from blocktrain.runtime import SideStream


class TooEarlyError(AssertionError):
    """A tensor was used while it was on its way."""


@dataclass(eq=False)
class Copy:
    """A copy under way. joined: the computation queued from now on waits for it."""

    to_host: bool
    source: int
    target: int
    joined: bool = False
    recorded: bool = False


@dataclass(eq=False)
class Stream:
    """A stream of the stand-in; the copies on it that the host has not waited for."""

    under_way: list[Copy] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        for copy in other.under_way:
            copy.joined = True

    def synchronize(self) -> None:
        self.under_way.clear()


def key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Streams(EagerDispatchMode):
    """The stand-in. problems: what was found where an exception cannot be raised, as a tensor is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = Stream()
        self.sides: list[Stream] = []
        self.current: Stream | None = None  # the side stream on which work is queued now
        self.to_host = False
        self.problems: list[str] = []
        self.copies = 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def under_way(self) -> list[Copy]:
        return [copy for side in self.sides for copy in side.under_way]

    def synchronize(self, *_: Any) -> None:
        for side in self.sides:
            side.synchronize()

    @contextmanager
    def queue_on(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        try:
            yield
        finally:
            self.current = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.current is not None and func is torch.ops.aten.copy_.default:
            return self._copy(func, args, kwargs)
        if func.is_view or func in (torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default):
            return func(*args, **kwargs)  # only the layout is looked at
        writes = [
            argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
        ]
        written = {
            key(leaf) for arg, is_written in zip(args, writes, strict=False) if is_written for leaf in _tensors(arg)
        }
        for tensor in _tensors((args, kwargs)):
            self._check(key(tensor), key(tensor) in written, f"{func} of {tuple(tensor.shape)}")
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        assert self.current is not None
        target, source = args[:2]
        for earlier in self.under_way:  # copies of one stream are in order
            if earlier not in self.current.under_way and key(source) == earlier.target:
                raise TooEarlyError("a copy is made of a copy that is on its way on another stream")
        self.copies += 1
        self.current.under_way.append(Copy(self.to_host, key(source), key(target)))
        for tensor in (source, target):
            self._watched[key(tensor)] = weakref.ref(tensor.untyped_storage(), partial(self._freed, key(tensor)))
        return func(*args, **kwargs)

    def _check(self, storage: int, is_written: bool, what: str) -> None:
        for copy in self.under_way:
            if storage == copy.target and not (copy.joined and not copy.to_host):
                raise TooEarlyError(f"{what} before the copy to the {'host' if copy.to_host else 'device'} is complete")
            if storage == copy.source and is_written and not (copy.joined and copy.to_host):
                raise TooEarlyError(f"{what} overwrites the source of a copy that is on its way")

    def _freed(self, storage: int, _: object) -> None:
        for copy in self.under_way:
            if storage == copy.target and not copy.to_host and not copy.joined:
                self.problems.append("a copy on the device was freed while it was on its way")
            if storage == copy.source and copy.to_host and not (copy.joined or copy.recorded):
                self.problems.append("the source of a copy to the host was freed without record_stream")
            # Its address may be that of another tensor soon.
            copy.source, copy.target = (0 if end == storage else end for end in (copy.source, copy.target))

    def record(self, tensor: Tensor) -> None:
        for copy in self.under_way:
            copy.recorded |= copy.source == key(tensor)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def recorded() -> Iterator[tuple[Streams, type[SideStream]]]:
    """The stand-in, at work, and a class of side streams that uses it; its device is the CPU by another name."""
    streams = Streams()

    class Side(SideStream):
        def __init__(self, device: torch.device):
            self.device = torch.device("cpu:0")  # of which no tensor says that it is there
            self._stream: Any = Stream()
            streams.sides.append(self._stream)

        def to_host(self, tensor: Tensor, *, is_kept: bool = True) -> Tensor:
            streams.to_host = True
            try:
                return super().to_host(tensor, is_kept=is_kept)
            finally:
                streams.to_host = False

    empty_like = torch.empty_like

    def empty(like: Tensor, *, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory and torch.device(options.get("device", like.device)).type != "cpu":
            raise RuntimeError("only dense CPU tensors can be pinned")
        return empty_like(like, **options)

    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: cudart)
        patch.setattr(torch.cuda, "synchronize", streams.synchronize)
        patch.setattr(torch.cuda, "current_stream", lambda *_: streams.compute)
        patch.setattr(torch.cuda, "stream", streams.queue_on)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, _: streams.record(tensor))
        patch.setattr(torch, "empty_like", empty)
        with streams:
            yield streams, Side
    assert not streams.problems

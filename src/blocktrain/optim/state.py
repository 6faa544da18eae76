"""Where a block's optimizer state stays while the block is frozen: nowhere, on the host, or on disk.

State is `{parameter name: {key: value}}`, the values being tensors or plain numbers as the optimizer keeps them.

`put` and `prefetch` return at once and work goes on behind the steps; `get` waits for it, and what went wrong is raised
at the store's next use. A crash in between loses what was being written, which nobody misses: a run goes on from its
last checkpoint, and making that one waited.

    visit to block 1      | steps ...                        | retire    | visit to block 2: steps ...
    behind it             | write state 0, read state 2      |           | write state 1, read state 0
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from blocktrain.errors import CheckpointError, storage_errors
from blocktrain.optim.background_worker import BackgroundWorker
from blocktrain.runtime import SideStream

BlockState = dict[str, dict[str, Any]]

_SEPARATOR = "//"  # between a parameter's name and its state's key, in files


class StateStore(Protocol):
    """Keeps the optimizer state of frozen blocks."""

    def put(self, block: int, state: BlockState) -> None:
        """Take the state of a block that retires."""
        ...

    def prefetch(self, block: int) -> None:
        """`get` will be asked for this block: begin to read."""
        ...

    def get(self, block: int) -> BlockState | None:
        """The state kept for a block, on the host; None where there is none."""
        ...

    def holds(self, block: int) -> bool:
        """Whether `get` would return something."""
        ...

    def clear(self) -> None:
        """Forget everything: a run starts, or goes back to a checkpoint."""
        ...


@dataclass(frozen=True)
class Drop:
    """Forget it: each visit starts with fresh moments (the paper's Algorithm 1, line 7)."""

    def put(self, block: int, state: BlockState) -> None:
        """Forget `state`."""

    def prefetch(self, block: int) -> None:
        """Nothing to read."""

    def get(self, block: int) -> BlockState | None:
        """Always None."""
        return None

    def holds(self, block: int) -> bool:
        """Always False."""
        return False

    def clear(self) -> None:
        """Nothing is kept."""


@dataclass(frozen=True)
class KeepOnHost:
    """Keep it in host memory: 8 bytes a parameter for Adam. From a GPU it is copied to page-locked memory behind the
    steps; the way back is one copy at activation, as a second set of moments on the device would be the peak."""

    kept: dict[int, BlockState] = field(default_factory=dict, init=False, repr=False)
    _copying: list[SideStream] = field(default_factory=list, init=False, repr=False)

    def put(self, block: int, state: BlockState) -> None:
        """Move `state` to the host and keep it."""
        self._wait()
        devices = {value.device for entries in state.values() for value in entries.values() if torch.is_tensor(value)}
        streams = {device: SideStream(device) for device in devices}
        self._copying.extend(streams.values())
        self.kept[block] = _mapped(state, lambda value: streams[value.device].to_host(value.detach()))

    def prefetch(self, block: int) -> None:
        """It is there."""

    def get(self, block: int) -> BlockState | None:
        """What was put last for this block."""
        self._wait()
        return self.kept.get(block)

    def holds(self, block: int) -> bool:
        """Whether this block has been put."""
        return block in self.kept

    def clear(self) -> None:
        """Free the host memory."""
        self._wait()
        self.kept.clear()

    def _wait(self) -> None:
        while self._copying:
            self._copying.pop().wait()


@dataclass(frozen=True)
class KeepOnDisk:
    """Keep it in `folder`, one safetensors file a block, replaced whole. What an earlier run left there is deleted.

    A thread writes and reads, one file after another. Host memory: the states under way, one or two blocks'.
    """

    folder: Path
    kept: set[int] = field(default_factory=set, init=False, repr=False)
    _behind: BackgroundWorker = field(default_factory=lambda: BackgroundWorker("state"), init=False, repr=False)
    _read: dict[int, Future[BlockState]] = field(default_factory=dict, init=False, repr=False)

    def put(self, block: int, state: BlockState) -> None:
        """Take a copy of `state` and begin to write it."""
        copy = to_host(state)
        self._read.pop(block, None)
        self._behind.wait()
        self._behind.submit(lambda: self._write(block, copy))
        self.kept.add(block)

    def prefetch(self, block: int) -> None:
        """Begin to read what was put last for this block."""
        if block in self.kept and block not in self._read:
            self._read[block] = self._behind.submit(lambda: self._load(block))

    def get(self, block: int) -> BlockState | None:
        """Read what was put last for this block.

        Raises `StorageError` if it could not be written, `CheckpointError` if its file is damaged or gone."""
        if block not in self.kept:
            return None
        self.prefetch(block)
        read = self._read.pop(block)
        self._behind.wait()
        return read.result()

    def holds(self, block: int) -> bool:
        """Whether this block has been put."""
        return block in self.kept

    def clear(self) -> None:
        """Delete this store's files; others in the folder stay."""
        self._read.clear()
        self._behind.forget()
        self.kept.clear()
        with storage_errors(self.folder):
            for path in Path(self.folder).glob("block-*.safetensors"):
                path.unlink()

    def _write(self, block: int, state: BlockState) -> None:
        path = self._path(block)
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".partial")
            temporary.write_bytes(encode_state(state))
            os.replace(temporary, path)

    def _load(self, block: int) -> BlockState:
        path = self._path(block)
        try:
            return decode_state(path.read_bytes())
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"optimizer state '{path}' is damaged or gone ({error}); resume the run from its last checkpoint"
            ) from error

    def _path(self, block: int) -> Path:
        return Path(self.folder) / f"block-{block}.safetensors"


class Kept:
    """The states of frozen blocks: in `store`, but for those of the visit that a checkpoint was taken in, which wait
    here for their blocks' next activation, whatever the store does."""

    def __init__(self, store: StateStore):
        self.store = store
        self.waiting: dict[int, BlockState] = {}

    def get(self, block: int) -> BlockState | None:
        """A block's state on the host, not to be changed; None where there is none."""
        return self.waiting[block] if block in self.waiting else self.store.get(block)

    def take(self, block: int) -> BlockState | None:
        """The same, for its activation."""
        state = self.get(block)
        self.waiting.pop(block, None)
        return state

    def holds(self, block: int) -> bool:
        """Whether `get` would return something."""
        return block in self.waiting or self.store.holds(block)

    def load(self, states: Mapping[int, BlockState], *, active: Collection[int]) -> None:
        """Forget everything and take `states`, of which those of `active` wait."""
        self.store.clear()
        self.waiting = {index: state for index, state in states.items() if index in active}
        for index, state in states.items():
            if index not in active:
                self.store.put(index, state)


def _mapped(state: BlockState, change: Callable[[Tensor], Tensor]) -> BlockState:
    """`state` with each tensor changed."""
    return {
        name: {key: change(value) if torch.is_tensor(value) else value for key, value in entries.items()}
        for name, entries in state.items()
    }


def to_host(state: BlockState) -> BlockState:
    """A copy of `state` in host memory, detached from the optimizer that goes on changing it."""
    return _mapped(state, lambda value: value.detach().to("cpu", copy=True))


def encode_state(state: BlockState) -> bytes:
    """safetensors bytes; plain numbers travel in the header."""
    tensors, numbers = {}, {}
    for name, entries in state.items():
        for key, value in entries.items():
            if torch.is_tensor(value):
                tensors[name + _SEPARATOR + key] = value.detach().contiguous()
            else:
                numbers[name + _SEPARATOR + key] = value
    return save(tensors, metadata={"numbers": json.dumps(numbers, sort_keys=True)})


def decode_state(data: bytes) -> BlockState:
    """What `encode_state` wrote, in alphabetical order: safetensors has none, and ranks that go through their states
    together must meet the same tensors. Nothing is unpickled."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    numbers: Mapping[str, Any] = json.loads(header["__metadata__"]["numbers"])
    state: BlockState = {}
    for joined, value in sorted([*load(data).items(), *numbers.items()], key=lambda item: item[0]):
        name, _, key = joined.rpartition(_SEPARATOR)
        state.setdefault(name, {})[key] = value
    return state

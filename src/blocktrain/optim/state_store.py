"""Stores a block's optimizer state while the block is frozen: nowhere, on the host, or on disk.

The state is `{parameter name: {key: value}}`, with tensors or plain numbers as values, as the optimizer keeps them.

`put` and `prefetch` return at once and the work goes on in the background; `get` waits for it, and an error is raised
at the store's next use. A crash loses what was still being written. That does no harm, because a run resumes from its
last checkpoint, and saving that checkpoint waited for the state.

    training      | visit to block 1: steps ...     | retire    | visit to block 2: steps ...
    background    | write state 0, read state 2     |           | write state 1, read state 0

A new kind of store is a class with the methods of `StateStore` and an entry in `STATE_STORES`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from blocktrain.errors import CheckpointError, ConfigError, nearest, storage_errors
from blocktrain.runtime import SideStream

BlockState = dict[str, dict[str, Any]]

_SEPARATOR = "//"  # between a parameter's name and its state's key, in files


class StateStore(Protocol):
    """Stores the optimizer state of frozen blocks."""

    def put(self, block: int, state: BlockState) -> None:
        """Store the state of a block that retires. The tensors may be changed as soon as this returns."""
        ...

    def prefetch(self, block: int) -> None:
        """`get` will be called for this block: start to read."""
        ...

    def get(self, block: int) -> BlockState | None:
        """The state stored for a block, on the host; None if there is none."""
        ...

    def holds(self, block: int) -> bool:
        """Whether `get` would return something."""
        ...

    def clear(self) -> None:
        """Forget everything: a run starts, or resumes from a checkpoint."""
        ...


@dataclass(frozen=True)
class Drop:
    """Store nothing: each visit starts with fresh moments (the paper's Algorithm 1, line 7)."""

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
        """Nothing is stored."""


@dataclass(frozen=True)
class KeepOnHost:
    """Store state in host memory: 8 bytes a parameter for Adam.

    From a GPU it is copied to page-locked memory in the background. The way back is one copy at activation, because a
    prefetched second set of moments on the device would raise the peak.
    """

    kept: dict[int, BlockState] = field(default_factory=dict, init=False, repr=False)
    _copying: list[SideStream] = field(default_factory=list, init=False, repr=False)

    def put(self, block: int, state: BlockState) -> None:
        """Start to copy `state` to the host."""
        self._wait()
        devices = {value.device for entries in state.values() for value in entries.values() if torch.is_tensor(value)}
        streams = {device: SideStream(device) for device in devices}
        self._copying.extend(streams.values())
        self.kept[block] = _map_tensors(state, lambda value: streams[value.device].to_host(value.detach()))

    def prefetch(self, block: int) -> None:
        """Nothing to read: the state is in host memory."""

    def get(self, block: int) -> BlockState | None:
        """The state that was put last for this block."""
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
    """Store state in `folder`, one safetensors file a block. A file is replaced as a whole; files of an earlier run are
    deleted.

    One thread writes and reads, one file after another; the process does not end before it is done. Host memory: the
    states on their way, of one or two blocks.
    """

    folder: Path
    kept: set[int] = field(default_factory=set, init=False, repr=False)
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="blocktrain-state"), init=False, repr=False
    )
    _submitted: list[Future[Any]] = field(default_factory=list, init=False, repr=False)
    _read: dict[int, Future[BlockState]] = field(default_factory=dict, init=False, repr=False)

    def put(self, block: int, state: BlockState) -> None:
        """Copy `state` to the host and start to write it."""
        copy = to_host(state)
        self._read.pop(block, None)
        self._wait()
        self._submitted.append(self._thread.submit(self._write, block, copy))
        self.kept.add(block)

    def prefetch(self, block: int) -> None:
        """Start to read the state that was put last for this block."""
        if block in self.kept and block not in self._read:
            self._read[block] = self._thread.submit(self._load, block)
            self._submitted.append(self._read[block])

    def get(self, block: int) -> BlockState | None:
        """The state that was put last for this block.

        Raises `StorageError` if it could not be written, `CheckpointError` if its file is damaged or gone."""
        if block not in self.kept:
            return None
        self.prefetch(block)
        read = self._read.pop(block)
        self._wait()
        return read.result()

    def holds(self, block: int) -> bool:
        """Whether this block has been put."""
        return block in self.kept

    def clear(self) -> None:
        """Delete this store's files; other files in the folder stay."""
        self._read.clear()
        wait(self._submitted)  # and ignore their errors
        self._submitted.clear()
        self.kept.clear()
        with storage_errors(self.folder):
            for path in Path(self.folder).glob("block-*.safetensors"):
                path.unlink()

    def _wait(self) -> None:
        """Return when the thread is done. Raises its first error, once."""
        submitted = self._submitted.copy()
        self._submitted.clear()
        errors = [future.exception() for future in submitted]
        for error in errors:
            if error is not None:
                raise error

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


# Name, as in `optimizer.state` of a configuration -> what makes the store of one rank, given its folder.
STATE_STORES: dict[str, Callable[[Path], StateStore]] = {
    "drop": lambda folder: Drop(),
    "host": lambda folder: KeepOnHost(),
    "disk": KeepOnDisk,
}


def make_state_store(name: str, folder: Path) -> StateStore:
    """The store registered under `name`. `folder` is its own, if it needs one. Raises `ConfigError` for other names."""
    if name not in STATE_STORES:
        raise ConfigError(f"optimizer.state '{name}' is unknown; {nearest(name, STATE_STORES)}")
    return STATE_STORES[name](folder)


def _map_tensors(state: BlockState, change: Callable[[Tensor], Tensor]) -> BlockState:
    """`state` with `change` applied to each tensor."""
    return {
        name: {key: change(value) if torch.is_tensor(value) else value for key, value in entries.items()}
        for name, entries in state.items()
    }


def to_host(state: BlockState) -> BlockState:
    """A copy of `state` in host memory, which the optimizer's next steps do not change."""
    return _map_tensors(state, lambda value: value.detach().to("cpu", copy=True))


def encode_state(state: BlockState) -> bytes:
    """The state in safetensors format; plain numbers are in its header."""
    tensors, numbers = {}, {}
    for name, entries in state.items():
        for key, value in entries.items():
            if torch.is_tensor(value):
                tensors[name + _SEPARATOR + key] = value.detach().contiguous()
            else:
                numbers[name + _SEPARATOR + key] = value
    return save(tensors, metadata={"numbers": json.dumps(numbers, sort_keys=True)})


def decode_state(data: bytes) -> BlockState:
    """The inverse of `encode_state`; nothing is unpickled.

    Names and keys are sorted, because safetensors keeps no order, and ranks that iterate over their states together
    must meet the same tensors.
    """
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    numbers: Mapping[str, Any] = json.loads(header["__metadata__"]["numbers"])
    state: BlockState = {}
    for joined, value in sorted([*load(data).items(), *numbers.items()], key=lambda item: item[0]):
        name, _, key = joined.rpartition(_SEPARATOR)
        state.setdefault(name, {})[key] = value
    return state

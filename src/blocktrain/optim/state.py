"""Where a block's optimizer state stays while the block is frozen: nowhere, on the host, or on disk.

State is `{parameter name: {key: value}}`, the values being tensors or plain numbers as the optimizer keeps them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from blocktrain.errors import CheckpointError, storage_errors

BlockState = dict[str, dict[str, Any]]

_SEPARATOR = "//"  # between a parameter's name and its state's key, in files


class StateStore(Protocol):
    """Keeps the optimizer state of frozen blocks."""

    def put(self, block: int, state: BlockState) -> None:
        """Take the state of a block that retires."""
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
    """Keep it in host memory: 8 bytes a parameter for Adam."""

    kept: dict[int, BlockState] = field(default_factory=dict, repr=False)

    def put(self, block: int, state: BlockState) -> None:
        """Move `state` to the host and keep it."""
        self.kept[block] = to_host(state)

    def get(self, block: int) -> BlockState | None:
        """What was put last for this block."""
        return self.kept.get(block)

    def holds(self, block: int) -> bool:
        """Whether this block has been put."""
        return block in self.kept

    def clear(self) -> None:
        """Free the host memory."""
        self.kept.clear()


@dataclass(frozen=True)
class KeepOnDisk:
    """Keep it in `folder`, one safetensors file a block, replaced whole. What an earlier run left there is deleted."""

    folder: Path
    kept: set[int] = field(default_factory=set, repr=False)

    def put(self, block: int, state: BlockState) -> None:
        """Write `state` to disk; raises `StorageError` when there is no room."""
        path = self._path(block)
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".partial")
            temporary.write_bytes(encode_state(state))
            os.replace(temporary, path)
        self.kept.add(block)

    def get(self, block: int) -> BlockState | None:
        """Read what was put last for this block; raises `CheckpointError` if its file is damaged or gone."""
        if block not in self.kept:
            return None
        path = self._path(block)
        try:
            return decode_state(path.read_bytes())
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"optimizer state '{path}' is damaged or gone ({error}); resume the run from its last checkpoint"
            ) from error

    def holds(self, block: int) -> bool:
        """Whether this block has been put."""
        return block in self.kept

    def clear(self) -> None:
        """Delete this store's files; others in the folder stay."""
        self.kept.clear()
        with storage_errors(self.folder):
            for path in Path(self.folder).glob("block-*.safetensors"):
                path.unlink()

    def _path(self, block: int) -> Path:
        return Path(self.folder) / f"block-{block}.safetensors"


def to_host(state: BlockState) -> BlockState:
    """A copy of `state` in host memory, detached from the optimizer that goes on changing it."""
    return {
        name: {
            key: value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value
            for key, value in entries.items()
        }
        for name, entries in state.items()
    }


def encode_state(state: BlockState) -> bytes:
    """safetensors bytes; plain numbers travel in the header."""
    tensors, numbers = {}, {}
    for name, entries in state.items():
        for key, value in entries.items():
            if torch.is_tensor(value):
                tensors[name + _SEPARATOR + key] = value.detach().contiguous()
            else:
                numbers[name + _SEPARATOR + key] = value
    return save(tensors, metadata={"numbers": json.dumps(numbers)})


def decode_state(data: bytes) -> BlockState:
    """What `encode_state` wrote. Nothing is unpickled."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    numbers: Mapping[str, Any] = json.loads(header["__metadata__"]["numbers"])
    state: BlockState = {}
    for joined, value in [*load(data).items(), *numbers.items()]:
        name, _, key = joined.rpartition(_SEPARATOR)
        state.setdefault(name, {})[key] = value
    return state

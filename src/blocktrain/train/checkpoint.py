"""Checkpoints: a folder of safetensors files, one a block, and a JSON list of them with checksums.

    checkpoints/step-00000300/
        weights-0.safetensors     block 0's parameters           \\
        state-0.safetensors       its optimizer's state           >  a block that has not changed since the last
        remainder-0.safetensors   what bf16 leaves out of it     /   checkpoint is a hard link to that one's file
        buffers.safetensors       BatchNorm statistics and the like
        checkpoint.json           progress, model fingerprint, size and SHA-256 of each file

So a checkpoint in mid-visit writes the active block alone. The folder is written under a temporary name, flushed to
disk and renamed: it is there whole or not at all. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from blocktrain.blocks.block import Block, Partition
from blocktrain.errors import CheckpointError, storage_errors
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.state import decode_state, encode_state
from blocktrain.train.progress import Progress

FORMAT = 1
MANIFEST = "checkpoint.json"
_WAY_OUT = "delete '{}' to go on from the checkpoint before it"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint gives back beside the tensors it has put in their places."""

    progress: Progress
    log_bytes: int  # length of events.jsonl at that moment


def fingerprint(partition: Partition) -> str:
    """A hash of the model's parameter names and shapes and of the blocks they are in."""
    layout = [[(name, list(p.shape)) for name, p in block.parameters.items()] for block in partition]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def save_checkpoint(
    folder: Path, *, progress: Progress, log_bytes: int, partition: Partition, optimizer: BlockOptimizer, keep: int
) -> Path:
    """Write `folder/step-NNNNNNNN`, then remove all but the newest `keep`; raises `StorageError` and leaves the older
    ones as they were when there is no room."""
    target = folder / f"step-{progress.step:08d}"
    temporary = folder / f".{target.name}.partial"
    existing = checkpoints(folder)
    with storage_errors(target):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            previous = _previous(existing, fingerprint(partition))
            files = _write_files(temporary, partition, optimizer, previous)
            manifest = {
                "format": FORMAT,
                "model": fingerprint(partition),
                "progress": progress.to_json(),
                "log_bytes": log_bytes,
                "optimizer": optimizer.position(),
                "files": files,
            }
            _write(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
            _flush_folder(temporary)
            if target.exists():  # the same step once more, after a resume
                shutil.rmtree(target)
            os.rename(temporary, target)
            _flush_folder(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def load_checkpoint(path: Path, partition: Partition, optimizer: BlockOptimizer) -> Saved:
    """Put a checkpoint's tensors into the model and the optimizer; raises `CheckpointError` before touching them
    when any file is missing, damaged, or of another model."""
    manifest = _read_manifest(path)
    if manifest["model"] != fingerprint(partition):
        raise CheckpointError(
            f"'{path}' is a checkpoint of another model or another division into blocks; "
            "resume with the configuration it was made with"
        )
    contents = {name: _read_checked(path / name, entry) for name, entry in manifest["files"].items()}
    tensors = {name: load(data) for name, data in contents.items() if not name.startswith("state-")}
    with torch.no_grad():
        for block in partition:
            saved = tensors[f"weights-{block.index}.safetensors"]
            for name, parameter in block.parameters.items():
                parameter.copy_(saved[name])
        buffers = dict(partition.model.named_buffers())
        for name, value in tensors.get("buffers.safetensors", {}).items():
            buffers[name].copy_(value)
    optimizer.load_state_dict(
        {
            **manifest["optimizer"],
            "blocks": {
                block.index: decode_state(contents[f"state-{block.index}.safetensors"])
                for block in partition
                if f"state-{block.index}.safetensors" in contents
            },
            "remainders": {block.index: tensors.get(f"remainder-{block.index}.safetensors", {}) for block in partition},
        }
    )
    return Saved(progress=Progress.from_json(manifest["progress"]), log_bytes=manifest["log_bytes"])


# -- files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Previous:
    """The checkpoint before: what has not changed since is linked, not written again."""

    path: Path
    changed_at: list[int]
    files: Mapping[str, Any]


def _previous(existing: list[Path], model: str) -> _Previous | None:
    if not existing:
        return None
    try:
        manifest = _read_manifest(existing[-1])
    except CheckpointError:
        return None
    if manifest["model"] != model:
        return None
    return _Previous(path=existing[-1], changed_at=manifest["optimizer"]["changed_at"], files=manifest["files"])


def _write_files(
    folder: Path, partition: Partition, optimizer: BlockOptimizer, previous: _Previous | None
) -> dict[str, dict[str, Any]]:
    """Write or link every file; returns the manifest's entries."""
    entries: dict[str, dict[str, Any]] = {}
    for block in partition:
        changed_at = optimizer.changed_at[block.index]
        unchanged = previous is not None and previous.changed_at[block.index] == changed_at
        for name, encode in _contents(block, optimizer).items():
            if unchanged and previous is not None and name in previous.files:
                os.link(previous.path / name, folder / name)
                entries[name] = previous.files[name]
            elif (data := encode()) is not None:
                entries[name] = _write(folder / name, data)
    buffers = persistent_buffers(partition.model)
    if buffers:
        entries["buffers.safetensors"] = _write(folder / "buffers.safetensors", save(buffers))
    return entries


def _contents(block: Block, optimizer: BlockOptimizer) -> dict[str, Callable[[], bytes | None]]:
    """File name -> its bytes, made only when they must be written; None where there is nothing to keep."""
    index = block.index

    def weights() -> bytes:
        return save({name: parameter.data.contiguous() for name, parameter in block.parameters.items()})

    def state() -> bytes | None:
        kept = optimizer.block_state(index)
        return None if kept is None else encode_state(kept)

    def remainder() -> bytes | None:
        left = optimizer.block_remainders(index)
        return save(left) if left else None

    return {
        f"weights-{index}.safetensors": weights,
        f"state-{index}.safetensors": state,
        f"remainder-{index}.safetensors": remainder,
    }


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What a state dict holds beside parameters: BatchNorm statistics and the like."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value.contiguous() for name, value in model.state_dict().items() if name not in parameters}


def _write(path: Path, data: bytes) -> dict[str, Any]:
    """Write `data` and see it onto the disk; returns its manifest entry."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _flush_folder(path: Path) -> None:
    """See a folder's entries onto the disk, so that a renamed file survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"'{path}' has format {manifest['format']}; this version reads format {FORMAT}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"'{path / MANIFEST}' cannot be read ({error}); {_WAY_OUT.format(path)}") from None
    return manifest


def _read_checked(path: Path, entry: Mapping[str, Any]) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read ({error.strerror}); {_WAY_OUT.format(path.parent)}") from None
    if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise CheckpointError(f"'{path}' is damaged: its checksum is wrong; {_WAY_OUT.format(path.parent)}")
    return data

"""Checkpoints: a folder of safetensors files, one a block, and a JSON list of them with checksums.

    checkpoints/step-00000300/
        weights-0.safetensors     block 0's parameters           \
        state-0.safetensors       its optimizer's state           >  a block that has not changed since the last
        remainder-0.safetensors   what bf16 leaves out of it     /   checkpoint is a hard link to that one's file
        buffers.safetensors       BatchNorm statistics and the like
        checkpoint.json           progress, model fingerprint, rows of divided matrices, facts of the data, size and
                                  SHA-256 of each file

So a checkpoint in mid-visit writes the active block alone. The folder is written under a temporary name, flushed to
disk and renamed: it is there whole or not at all. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from blocktrain.chain.block import Block, Partition
from blocktrain.errors import CheckpointError, DataError, storage_errors
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.master import LowBits
from blocktrain.optim.precision import Precision, join, split
from blocktrain.optim.state_store import BlockState, decode_state, encode_state
from blocktrain.outputs import remove
from blocktrain.parse import parse_json
from blocktrain.stopping import RuleState


@dataclass(kw_only=True)
class TrainerState:
    """Position in the schedule and sums so far. Data order and randomness follow from `step` and the seed."""

    step: int = 0  # optimizer steps done
    skipped: int = 0  # of these, steps that were skipped because they were not finite
    visit: int = 0  # index of the current visit
    visit_step: int = 0  # steps of it done
    sweep: int = 0
    tokens: int = 0
    flops: int = 0
    seconds: float = 0.0  # wall-clock of all sessions
    optimizer_bytes: int = 0  # the most held so far by the active block's optimizer
    rule: RuleState = field(default_factory=dict)
    visit_over: str | None = None  # why the current visit has ended, once it has
    run_over: str | None = None
    evaluated: int | None = None  # step of the last evaluation
    score: dict[str, Any] = field(default_factory=dict)  # its figures
    best: RuleState = field(default_factory=dict)  # the best evaluation so far, see `stopping.best_evaluation`
    techniques: dict[str, Any] = field(default_factory=dict)  # the state of each that has one, by name
    micro_rows: int | None = None  # what `batch.micro_rows = "auto"` came to
    header: dict[str, Any] = field(default_factory=dict)  # the run's header record: how it is trained at present

    @property
    def has_finite_loss(self) -> bool:
        """Whether the last validation loss, if there was one, is a number."""
        loss = self.score.get("loss", 0.0)
        return loss is not None and math.isfinite(float(loss))


FORMAT = 2
MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})")
_LEFT = re.compile(r"\.step-\d{8,}\.(partial|old)")  # by a killed process


@dataclass(frozen=True, kw_only=True)
class CheckpointHeader:
    """What a checkpoint holds beside tensors."""

    progress: TrainerState
    log_bytes: int  # length of events.jsonl at that moment
    data: str  # fingerprint of the training rows
    config: Mapping[str, Any] = field(default_factory=dict)  # the run's configuration
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the data, for `export` (`data/facts.py`)


def fingerprint(partition: Partition) -> str:
    """A hash of the model's parameter names and shapes and of the blocks they are in."""
    layout = [
        [
            (name, [len(block.rows[name]), *p.shape[1:]] if name in block.rows else list(p.shape))
            for name, p in block.parameters.items()
        ]
        for block in partition
    ]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=step_of)


def best_checkpoint(among: Sequence[Path]) -> Path | None:
    """The checkpoint with the lowest validation loss, the first of equals. Those that are damaged, and those that were
    not written right after an evaluation, have none."""
    losses: dict[Path, float] = {}
    for path in among:
        with suppress(CheckpointError):
            progress = read_header(path).progress
            if progress.evaluated == progress.step and "loss" in progress.score and progress.has_finite_loss:
                losses[path] = progress.score["loss"]
    return min(losses, key=losses.__getitem__, default=None)


def find_checkpoint(folder: Path, which: str = "newest") -> Path:
    """The "newest" checkpoint in `folder`, the "best" one (`best_checkpoint`), or that of a step, by its number. Raises
    `CheckpointError` where there is none."""
    found = checkpoints(folder)
    if not found:
        raise CheckpointError(
            f"'{folder.parent}' has no checkpoint yet; train first: blocktrain resume {folder.parent}"
        )
    if which == "newest":
        return found[-1]
    steps = ", ".join(str(step_of(path)) for path in found)
    if which == "best":
        best = best_checkpoint(found)
        if best is None:
            raise CheckpointError(
                f"no checkpoint of '{folder.parent}' was written right after an evaluation, so none is known to be the "
                f"best; choose a step: {steps}; and set checkpoint.every to a multiple of evaluation.every next time"
            )
        return best
    for path in found:
        if str(step_of(path)) == which:
            return path
    raise CheckpointError(f"'{folder.parent}' has no checkpoint '{which}'; choose newest, best or a step: {steps}")


def step_of(checkpoint: Path) -> int:
    """Optimizer steps before this checkpoint, by its folder's name."""
    return int(checkpoint.name.removeprefix("step-"))


class CheckpointSource(Protocol):
    """What a checkpoint is written from: a `BlockOptimizer`, or those of several ranks (`gathered_state.py`)."""

    @property
    def precision(self) -> Precision:
        """The precision of the weights."""
        ...

    @property
    def changed_at(self) -> list[int]:
        """The step that last updated each block."""
        ...

    def progress(self) -> dict[str, Any]:
        """Plain values."""
        ...

    def block_weights(self, index: int) -> Mapping[str, Tensor]:
        """The block's weights by name."""
        ...

    def has_state(self, index: int) -> bool:
        """Whether there is a `block_state`."""
        ...

    def block_state(self, index: int) -> BlockState | None:
        """The optimizer state of the block; None where there is none."""
        ...

    def has_low_bits(self, index: int) -> bool:
        """Whether there are `block_low_bits`."""
        ...

    def block_low_bits(self, index: int) -> LowBits:
        """The low 16 bits of the block's masters."""
        ...


def blocks_to_write(folder: Path, step: int, *, partition: Partition, trained: CheckpointSource) -> list[int]:
    """Indices of the blocks that `save_checkpoint` at `step` has to write, in order, because not all of their files can
    be hard links to those of the newest checkpoint in `folder`."""
    existing = checkpoints(folder)
    if folder / f"step-{step:08d}" in existing:
        return []
    unchanged = _unchanged_files(existing, partition, trained)
    return [block.index for block in partition if not unchanged.keys() >= _contents(block, trained).keys()]


def save_checkpoint(
    folder: Path,
    saved: CheckpointHeader,
    *,
    partition: Partition,
    trained: CheckpointSource,
    keep: int,
    keep_best: bool = False,
) -> Path:
    """Write `folder/step-NNNNNNNN`, then remove all but the newest `keep` and, with `keep_best`, the best one; raises
    `StorageError` and leaves the older ones as they were when there is no room. A checkpoint of this step that exists
    already is kept: it holds the same state."""
    target = folder / f"step-{saved.progress.step:08d}"
    existing = checkpoints(folder)
    if target in existing:
        return target
    temporary = folder / f".{target.name}.partial"
    with storage_errors(target):
        for path in folder.glob("*step-*"):  # what killed processes left half-written or half-deleted
            if _LEFT.fullmatch(path.name) or (_NAME.fullmatch(path.name) and not (path / MANIFEST).is_file()):
                remove(path)
        temporary.mkdir(parents=True)
        try:
            contents = {
                "format": FORMAT,
                "model": fingerprint(partition),
                "progress": asdict(saved.progress),
                "log_bytes": saved.log_bytes,
                "data": saved.data,
                "config": dict(saved.config),
                "facts": dict(saved.facts),
                "rows": {
                    str(block.index): {name: [rows.start, rows.stop] for name, rows in block.rows.items()}
                    for block in partition
                },
                "precision": trained.precision.name,
                "optimizer": trained.progress(),
                "files": _write_files(temporary, existing, partition, trained),
            }
            _write(temporary / MANIFEST, json.dumps({**contents, "sha256": _digest(contents)}, indent=1).encode())
            _flush_folder(temporary)
            os.rename(temporary, target)
            _flush_folder(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        best = best_checkpoint([*existing, target]) if keep_best else None
        for old in [path for path in [*existing, target][:-keep] if path != best]:
            hidden = old.with_name(f".{old.name}.old")  # gone at once, whatever happens while its files are deleted
            os.rename(old, hidden)
            shutil.rmtree(hidden)
    return target


def read_header(path: Path) -> CheckpointHeader:
    """A checkpoint without its tensors; raises `CheckpointError` where its manifest is damaged."""
    return _header(_read_manifest(path))


def _header(manifest: Mapping[str, Any]) -> CheckpointHeader:
    progress = manifest["progress"]
    if {*progress, "best"} != {item.name for item in fields(TrainerState)}:  # earlier versions noted no best
        raise CheckpointError(f"the checkpoint's progress has fields {sorted(progress)}; it is of another version")
    return CheckpointHeader(
        progress=TrainerState(**progress),
        log_bytes=manifest["log_bytes"],
        data=manifest["data"],
        config=manifest["config"],
        facts=manifest.get("facts", {}),
    )


def load_checkpoint(path: Path, partition: Partition, optimizer: BlockOptimizer) -> CheckpointHeader:
    """Put a checkpoint's tensors into the model and the optimizer; raises `CheckpointError` before touching them
    when any file is missing, damaged, or of another model."""
    manifest = _read_manifest(path)
    if manifest["model"] != fingerprint(partition):
        raise CheckpointError(
            f"'{path}' is a checkpoint of another model or another division into blocks; "
            "resume with the configuration it was made with"
        )
    files, active = manifest["files"], manifest["optimizer"]["active"]
    for name, entry in files.items():
        _verify(path / name, entry)
    states, low_bits = {}, {}
    with torch.no_grad():
        for block in partition:
            state = f"state-{block.index}.safetensors"
            if state in files:
                states[block.index] = decode_state((path / state).read_bytes())
            needed = optimizer.precision.has_master if block.index in active else optimizer.precision.keeps_low_bits
            weights, low_bits[block.index] = _read_block(path, block.index, files, low_bits=needed)
            optimizer.load_block_weights(block.index, weights)
        optimizer.load_state_dict({**manifest["optimizer"], "blocks": states, "low_bits": low_bits})
        if "buffers.safetensors" in files:
            _load_buffers(path, partition.model)
    return _header(manifest)


@torch.no_grad()
def load_exact_weights(path: Path, model: nn.Module) -> None:
    """Put a checkpoint's weights into `model`, whose parameters are in fp32: bit for bit what training arrived at. It
    needs neither the division into blocks nor an optimizer.

    Raises `CheckpointError` when any file is missing or damaged, when the checkpoint is of another model, and when it
    lacks some of the model's weights.
    """
    manifest = _read_manifest(path)
    files, parameters = manifest["files"], dict(model.named_parameters(remove_duplicate=False))
    missing = sum(parameter.numel() for parameter in model.parameters())
    for name, entry in files.items():
        if not name.startswith("state-"):
            _verify(path / name, entry)
    another = f"'{path}' is a checkpoint of another model than the configuration in run.json describes"
    for index, rows in manifest["rows"].items():
        for name, value in _read_block(path, int(index), files, low_bits=False)[0].items():
            whole = parameters.get(name)
            mine = whole if whole is None else whole[slice(*rows[name])] if name in rows else whole
            if mine is None or mine.shape != value.shape:
                raise CheckpointError(f"{another} (it has a '{name}' of shape {list(value.shape)})")
            mine.copy_(value)
            missing -= value.numel()
    if missing:
        raise CheckpointError(f"{another} ({missing} of the model's weights are not in it)")
    if "buffers.safetensors" in files:
        _load_buffers(path, model)


def _load_buffers(path: Path, model: nn.Module) -> None:
    buffers = dict(model.named_buffers())
    for name, value in load_file(path / "buffers.safetensors").items():
        buffers[name].copy_(value)


def _read_block(
    path: Path, index: int, files: Mapping[str, Any], *, low_bits: bool
) -> tuple[dict[str, Tensor], LowBits]:
    """A block's weights, and the low bits of its fp32 values. Where it was saved in another precision, the fp32 values
    are joined and, if `low_bits` are needed, split again, without losing a bit."""
    name = f"remainder-{index}.safetensors"
    weights = load_file(path / f"weights-{index}.safetensors")
    kept = load_file(path / name) if name in files else {}
    if bool(kept) == low_bits:
        return weights, kept
    exact = {name: join(value, kept[name]) if name in kept else value.float() for name, value in weights.items()}
    if not low_bits:
        return exact, {}
    parts = {name: split(value) for name, value in exact.items()}
    return {name: part for name, (part, _) in parts.items()}, {name: left for name, (_, left) in parts.items()}


# -- files ----------------------------------------------------------------------------------------------------------


def _unchanged_files(existing: list[Path], partition: Partition, trained: CheckpointSource) -> dict[str, Any]:
    """The files of the newest checkpoint that can be linked, because no step has moved their blocks since: name ->
    manifest entry."""
    try:
        manifest = _read_manifest(existing[-1]) if existing else {}
    except CheckpointError:
        manifest = {}
    if (manifest.get("model"), manifest.get("precision")) != (fingerprint(partition), trained.precision.name):
        return {}
    files, changed_at = manifest["files"], manifest["optimizer"]["changed_at"]
    unchanged = [block for block in partition if changed_at[block.index] == trained.changed_at[block.index]]
    return {name: files[name] for block in unchanged for name in _contents(block, trained) if name in files}


def _write_files(
    folder: Path, existing: list[Path], partition: Partition, trained: CheckpointSource
) -> dict[str, dict[str, Any]]:
    """Write every file into `folder`, or link it to that of the newest `existing` checkpoint; returns the manifest's
    entries."""
    unchanged = _unchanged_files(existing, partition, trained)
    entries: dict[str, dict[str, Any]] = {}
    for block in partition:
        for name, encode in _contents(block, trained).items():
            if name not in unchanged:
                entries[name] = _write(folder / name, encode())
                continue
            entries[name] = unchanged[name]
            try:
                os.link(existing[-1] / name, folder / name)
            except OSError:  # the file system has no hard links
                shutil.copyfile(existing[-1] / name, folder / name)
    parameters = {name for name, _ in partition.model.named_parameters(remove_duplicate=False)}
    state = partition.model.state_dict()
    buffers = {name: value.contiguous() for name, value in state.items() if name not in parameters}
    if buffers:  # BatchNorm statistics and the like
        entries["buffers.safetensors"] = _write(folder / "buffers.safetensors", save(buffers))
    return entries


def _contents(block: Block, trained: CheckpointSource) -> dict[str, Callable[[], bytes]]:
    """File name -> its bytes, made only when they must be written."""
    index = block.index
    contents = {
        f"weights-{index}.safetensors": lambda: save(
            {name: value.contiguous() for name, value in trained.block_weights(index).items()}
        )
    }
    if trained.has_state(index):
        contents[f"state-{index}.safetensors"] = lambda: encode_state(trained.block_state(index) or {})
    if trained.has_low_bits(index):
        contents[f"remainder-{index}.safetensors"] = lambda: save(trained.block_low_bits(index))
    return contents


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


def _digest(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = parse_json((path / MANIFEST).read_bytes(), "it")
        if not isinstance(manifest, dict) or not {"format", "sha256"} <= manifest.keys():
            raise ValueError("it is no list of a checkpoint's files")
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"'{path}' has format {manifest['format']}; this version reads format {FORMAT}")
        if manifest.pop("sha256") != _digest(manifest):
            raise ValueError("its checksum is wrong")
    except (OSError, ValueError, DataError) as error:
        raise CheckpointError(f"'{path / MANIFEST}' cannot be read ({error}); {_way_out(path / MANIFEST)}") from None
    return manifest


def _verify(path: Path, entry: Mapping[str, Any]) -> None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read ({error.strerror}); {_way_out(path)}") from None
    if digest != entry["sha256"]:
        raise CheckpointError(f"'{path}' is damaged: its checksum is wrong; {_way_out(path)}")


def _way_out(path: Path) -> str:
    """How to recover from a bad file: an older checkpoint may have a good one, or share this very file."""
    mine = path.parent
    older = [other for other in checkpoints(mine.parent) if step_of(other) < step_of(mine)]
    sound = [
        other
        for other in older
        if not (path.exists() and (other / path.name).exists() and path.samefile(other / path.name))
    ]
    if sound:
        return f"delete '{mine}' to go on from '{sound[-1].name}'"
    return (
        f"no older checkpoint has another copy of it; restore '{mine}' from a backup, or start a new run with "
        "another --out"
    )

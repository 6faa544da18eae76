"""Exports a checkpoint to a folder that `from_pretrained` loads: safetensors, configuration, tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import nn

from blocktrain.chain.model_loading import ModelConfig
from blocktrain.chain.pretrained import saved_dtype
from blocktrain.chain.resnet import ResNet
from blocktrain.data.facts import DataFacts
from blocktrain.errors import CheckpointError, ConfigError, NonFiniteError, storage_errors
from blocktrain.outputs import remove
from blocktrain.train.checkpoint import TrainerState, find_checkpoint, load_exact_weights, read_header
from blocktrain.train.context import load_model_for
from blocktrain.train.run_folder import RunFolder
from blocktrain.train.toml_dataclasses import to_mapping

ExportDtype = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    folder: RunFolder,
    out: Path,
    *,
    checkpoint: str = "newest",
    dtype: ExportDtype | None = None,
    accepts_nonfinite: bool = False,
    also: Callable[[Path], None] | None = None,
) -> Path:
    """Write the trained model to `out`, which must not exist or be empty; it appears whole or not at all.
    The training data are not needed.

    checkpoint: "newest", "best" (`find_checkpoint`) or a step's number.
    dtype: of the weights; None for that of the weights that training began with at `model.path`, and fp32 where it
        began at random ones. fp32 is bit for bit what training arrived at, whatever the precision; other dtypes are
        rounded to nearest.
    accepts_nonfinite: export a model even if its last validation loss, or one of its weights, is not finite.
    also: called with the folder before it appears, to add something (a model card) to it.

    Raises `ConfigError` if `dtype` cannot hold a weight, `CheckpointError` if there is no intact checkpoint, and
    `NonFiniteError` for a model that has diverged.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"'{out}' already exists and is not empty; choose another folder")
    folder.require_resumable()
    config = folder.config()
    out = Path(os.path.realpath(out))  # `Path.resolve` raises an error of its own for a link to itself
    chosen = find_checkpoint(folder.checkpoints, checkpoint)
    header = read_header(chosen)
    if not accepts_nonfinite:
        _require_finite_loss(chosen, header.progress)
    if not header.facts:
        raise CheckpointError(
            f"'{chosen}' was written by an earlier version of blocktrain, which did not keep what an export needs; "
            "train again with this version"
        )
    facts = DataFacts.from_mapping(header.facts)
    model = load_model_for(config.model, facts)
    tokenizer = facts.load_tokenizer()
    load_exact_weights(chosen, model)
    if not accepts_nonfinite:
        _require_finite_weights(model, chosen)
    _round(model, _default_dtype(config.model) if dtype is None else DTYPES[dtype])
    temporary = out.with_name(f".{out.name}.partial")
    with storage_errors(out):
        remove(temporary)
        temporary.mkdir(parents=True)
        try:
            _save_model(model, config.model, temporary)
            if tokenizer is not None:
                tokenizer.save(temporary)
            if also is not None:
                also(temporary)
            if out.exists():
                out.rmdir()
            os.rename(temporary, out)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return out


_DIVERGED = (
    "the run has diverged, so its model is of no use: train again with a lower optimizer.lr or with "
    "optimizer.max_grad_norm, or export it as it is with --force"
)


def _require_finite_loss(checkpoint: Path, progress: TrainerState) -> None:
    if not progress.has_finite_loss:
        loss = progress.score["loss"]
        raise NonFiniteError(
            f"the last validation loss of '{checkpoint}' is {loss} (step {progress.evaluated}); {_DIVERGED}"
        )


def _require_finite_weights(model: nn.Module, checkpoint: Path) -> None:
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise NonFiniteError(f"'{name}' in '{checkpoint}' has values that are not finite; {_DIVERGED}")


def _default_dtype(config: ModelConfig) -> torch.dtype:
    is_loaded = config.path is not None and config.weights == "pretrained"
    return saved_dtype(str(Path(str(config.path)).expanduser())) if is_loaded else torch.float32


@torch.no_grad()
def _round(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights and buffers of `model`; raises `ConfigError` where a finite value would become infinite."""
    if dtype == torch.float32:
        return
    largest = torch.finfo(dtype).max
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point():
            continue
        rounded = tensor.to(dtype)
        if bool((rounded.isinf() & tensor.isfinite()).any()):
            raise ConfigError(
                f"'{name}' has values of up to {float(tensor.abs().max()):.3g}, and {str(dtype).removeprefix('torch.')}"
                f" ends at {largest:.3g}; export with --dtype {'fp32' if dtype == torch.bfloat16 else 'bf16 or fp32'}"
            )
        tensor.data = rounded


def _save_model(model: nn.Module, config: ModelConfig, folder: Path) -> None:
    if isinstance(model, ResNet):
        tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(to_mapping(config)))
        return
    pretrained: Any = model
    if hasattr(pretrained.config, "use_cache"):
        pretrained.config.use_cache = True  # training kept no keys and values; generation needs it
    pretrained.save_pretrained(folder)

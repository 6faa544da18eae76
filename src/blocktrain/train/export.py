"""Exports the newest checkpoint to a folder that `from_pretrained` loads: safetensors, configuration, tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from blocktrain.chain.resnet import ResNet
from blocktrain.errors import CheckpointError, ConfigError, storage_errors
from blocktrain.optim.precision import BF16_EXACT, join, preset
from blocktrain.train.checkpoint import checkpoints, load_checkpoint
from blocktrain.train.context import TrainingContext, build
from blocktrain.train.run_folder import RunFolder
from blocktrain.train.toml_dataclasses import to_mapping


def export(folder: RunFolder, out: Path, *, also: Callable[[Path], None] | None = None) -> Path:
    """Write the trained model to `out`, which must not exist or be empty; it appears whole or not at all.

    Weights are written in fp32, bit for bit what training arrived at, whatever the precision. also: called with the
    folder before it appears, to add something (a model card) to it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"'{out}' already exists and is not empty; choose another folder")
    folder.require_resumable()
    config = folder.config()
    out = out.resolve()
    found = checkpoints(folder.checkpoints)
    if not found:
        raise CheckpointError(f"'{folder.path}' has no checkpoint yet; train first: blocktrain resume {folder.path}")
    config = replace(
        config,
        optimizer=replace(config.optimizer, state="drop"),  # the run's own moments stay untouched
        memory=replace(config.memory, frozen="device"),
        # Quantized weights are for training; their masters are those of the unquantized precision.
        precision=BF16_EXACT.name if preset(config.precision).is_quantized else config.precision,
    )
    context = build(config, folder.path)
    load_checkpoint(found[-1], context.partition, context.optimizer)
    _restore_masters(context)
    temporary = out.with_name(f".{out.name}.partial")
    with storage_errors(out):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            _save_model(context, temporary)
            if context.tokenizer is not None:
                context.tokenizer.save(temporary)
            if also is not None:
                also(temporary)
            if out.exists():
                out.rmdir()
            os.rename(temporary, out)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return out


@torch.no_grad()
def _restore_masters(context: TrainingContext) -> None:
    half = {name: parameter.data for name, parameter in context.partition.whole.parameters.items()}
    for name, parameter in context.partition.whole.parameters.items():
        parameter.data = half[name].float()
    for parameter in context.partition.chain.untrained_parameters.values():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    for block in context.partition:
        for name, remainder in context.optimizer.block_low_bits(block.index).items():
            mine = block.part(name, half[name])
            block.part(name, block.parameters[name].data).copy_(join(mine, remainder.to(mine.device)))


def _save_model(context: TrainingContext, folder: Path) -> None:
    if isinstance(context.model, ResNet):
        tensors = {name: value.contiguous() for name, value in context.model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(to_mapping(context.config.model)))
        return
    pretrained: Any = context.model
    if hasattr(pretrained.config, "use_cache"):
        pretrained.config.use_cache = True  # training kept no keys and values; generation needs it
    pretrained.cpu().save_pretrained(folder)

"""Liger's kernels for norms and gated activations, in place of a model's own. CUDA only; nothing of it is ours.

Only modules of this model are replaced: Liger's rotary embedding and plain cross-entropy would replace functions that
every model in the process uses, and its fused loss is the model's `forward` anew, which knows no other chunked loss.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch
from torch import nn

from blocktrain.errors import ConfigError

Kernels = Literal["torch", "liger", "auto"]

OURS = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}


def choose_kernels(kernels: Kernels, device: torch.device) -> Literal["torch", "liger"]:
    """What `kernels` means on this machine; `ConfigError` where Liger is asked for and cannot be had."""
    installed = importlib.util.find_spec("liger_kernel") is not None
    if kernels == "auto":
        return "liger" if installed and device.type == "cuda" else "torch"
    if kernels == "liger" and device.type != "cuda":
        raise ConfigError(f"kernels = 'liger' needs a CUDA device, not '{device}'; set kernels = 'auto' or 'torch'")
    if kernels == "liger" and not installed:
        raise ConfigError("kernels = 'liger', but it is not installed: pip install liger-kernel, or kernels = 'torch'")
    return kernels


def apply_liger(model: nn.Module) -> None:
    """Replace the modules of a Hugging Face model that Liger knows; a model it does not know stays as it is."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # pyright: ignore[reportMissingImports]

    _apply_liger_kernel_to_instance(model=model, **OURS)

"""Liger's kernels for norms and gated activations, in place of a model's own. CUDA only; all kernels are Liger's.

Only modules of the given model are replaced. Liger's rotary embedding and plain cross-entropy are left out because they
replace functions that every model in the process uses. Its fused loss is left out because it replaces the model's
`forward`, which then cannot have the chunked loss of `chunked_loss.py`.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch
from torch import nn

from blocktrain.errors import ConfigError

Kernels = Literal["torch", "liger", "auto"]


def choose_kernels(kernels: Kernels, device: torch.device) -> Literal["torch", "liger"]:
    """What `kernels` means on this machine; raises `ConfigError` where Liger is requested and not available."""
    installed = importlib.util.find_spec("liger_kernel") is not None
    if kernels == "auto":
        return "liger" if installed and device.type == "cuda" else "torch"
    if kernels == "liger" and device.type != "cuda":
        raise ConfigError(f"kernels = 'liger' needs a CUDA device, not '{device}'; set kernels = 'auto' or 'torch'")
    if kernels == "liger" and not installed:
        raise ConfigError("kernels = 'liger', but it is not installed: pip install liger-kernel, or kernels = 'torch'")
    return kernels


def apply_liger(model: nn.Module) -> None:
    """Replace the modules of a Hugging Face model that Liger has kernels for; other models stay as they are."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance  # pyright: ignore[reportMissingImports]

    _apply_liger_kernel_to_instance(model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)

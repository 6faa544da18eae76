"""A batch: the keyword arguments of a model's forward call, by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Batch = Mapping[str, Tensor]


def to_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The batch on `device`; the copy is asynchronous where the host memory is pinned."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

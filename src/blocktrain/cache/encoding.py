"""Encodes hidden states for storage: as they are, in bf16, or in 8 bits with a scale for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

EncodingKind = Literal["compute", "bf16", "int8"]
Fields = dict[str, Tensor]  # what is stored for a batch of rows; the first dimension counts the rows


@dataclass(frozen=True)
class Encoding:
    """Turns hidden states (B, ..., d) into stored fields and back."""

    kind: EncodingKind

    def encode(self, hidden: Tensor) -> Fields:
        """`data`, and for int8 `scale` (B, ..., 1): the largest magnitude of each token over 127."""
        match self.kind:
            case "compute":
                return {"data": hidden}
            case "bf16":
                return {"data": hidden.to(torch.bfloat16)}
            case "int8":
                values = hidden.float()
                scale = values.abs().amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny).div_(127)
                return {"data": (values / scale).round_().to(torch.int8), "scale": scale}

    def decode(self, fields: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The hidden states in `dtype`; with kind "compute", exactly those that were encoded."""
        if self.kind == "int8":
            return (fields["data"].float() * fields["scale"]).to(dtype)
        return fields["data"].to(dtype)

    def error(self, hidden: Tensor) -> float:
        """The root mean square of the error that encoding makes, relative to the root mean square of `hidden`."""
        if self.kind == "compute":
            return 0.0
        lost = self.decode(self.encode(hidden), torch.float32) - hidden.float()
        return float(lost.square().mean().sqrt() / hidden.float().square().mean().sqrt().clamp(min=1e-30))

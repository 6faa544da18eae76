"""Dispatch modes that see the operations of an eager step, which no compiler ever looks into."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class EagerDispatchMode(TorchDispatchMode):
    """PyTorch puts a guard against `torch.compile` around every mode's handler (2.13: a tenth of the time of a step
    on tensors without memory, for each mode). These run on copies that nobody compiles, and go without."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

"""The base class of dispatch modes that watch the operations of an eager step, which nobody compiles."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode without PyTorch's guard against `torch.compile` around its handler. The guard of PyTorch 2.13
    takes, for each mode, a tenth of the time of a step on fake tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

"""The small GPT-2 and the batches of the optimizer tests."""

from ..optim.conftest import batch, gpt2

__all__ = ["batch", "gpt2"]

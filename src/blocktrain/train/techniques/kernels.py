"""`memory.kernels`: Liger's norms and activations in place of the model's own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import nn

from blocktrain.modules.kernels import apply_liger, choose_kernels
from blocktrain.records.run_records import Opening
from blocktrain.train.context import TrainingContext
from blocktrain.train.technique import Technique


class LigerKernels(Technique):
    """Replaces modules of the model for good, after its FLOPs were counted: Liger's kernels run on no fake tensor."""

    def __init__(self, model: nn.Module):
        self._model = model

    def around_run(self) -> AbstractContextManager[object]:
        """See `Technique`."""
        apply_liger(self._model)
        return nullcontext()


def build(context: TrainingContext, opening: Opening, folder: Path) -> LigerKernels | None:
    """Only where Liger's kernels are chosen."""
    chosen = choose_kernels(context.config.memory.kernels, context.device)
    return LigerKernels(context.model) if chosen == "liger" else None

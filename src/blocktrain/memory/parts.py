"""The parts of a step's memory: one vocabulary for the tracker, the optimizer, the planner and the reports.

    what              prefix        active block                            tail
    weights           frozen        active (and master, under bf16)         frozen
    optimizer                       gradients, moments
    forward pass      inputs        activations                             activations, logits

Each byte that is alive on the device belongs to exactly one part. This file needs no PyTorch, so that the planner may
import it.
"""

from __future__ import annotations

from typing import Final

FROZEN: Final = "frozen"  # weights of the frozen blocks, as they are stored: fp32, bf16, int8 or nf4
ACTIVE: Final = "active"  # weights of the active block; a matrix that it owns some rows of counts whole
MASTER: Final = "master"  # fp32 copies of the active weights, where those have another dtype
GRADIENTS: Final = "gradients"  # accumulated gradients, and those that are still being computed
MOMENTS: Final = "moments"  # the optimizer's state for the active block
ACTIVATIONS: Final = "activations"  # any other result of an operation: saved for the backward pass, or temporary
LOGITS: Final = "logits"  # whatever is as wide as the vocabulary: logits, their softmax and their gradient
INPUTS: Final = "inputs"  # the batch
BUFFERS: Final = "buffers"  # tensors of the model that are not trained: BatchNorm statistics, rotary tables
HOST: Final = "host"  # in host memory, so not a part of the device's peak

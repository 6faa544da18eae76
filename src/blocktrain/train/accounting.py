"""What memory a run will need, by part, before it takes it: its own steps, taken on a copy without memory.

Each block is activated, trained for two steps and retired by the code that trains the real model; in the second step
its moments are there from the beginning, as in every later one. `model/tracker.py` tells what was alive at the worst
moment and whose it was:

    frozen        weights at rest                       active        weights of the block (a shared matrix: whole)
    master        their fp32 copies                     gradients     as accumulated, and on their way there
    moments       the optimizer's state                 logits        whatever is as wide as the vocabulary
    activations   everything else that an operation returned: saved for the backward pass, or used for a moment
    buffers       BatchNorm statistics, rotary tables   inputs        the batch

On the CPU of a machine with a GPU the copy's device and host memory are one, so `host` (what frozen blocks left
there) is kept apart by label. Moments kept between visits and a prefix cache lie beside the step and are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from blocktrain.blocks.block import Block, Partition
from blocktrain.model.fake import fake_copy
from blocktrain.model.tracker import MemoryTracker, Peak
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.recipe import any_number

Loss = Callable[[nn.Module], Tensor]  # one micro-batch: forward pass and mean loss of the model it is given


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a step does beside the model: `loss` over each of `micro_steps`, then clip to `max_grad_norm`, update.

    inputs: tensors of the batch, counted as such.
    """

    loss: Loss
    micro_steps: int = 1
    max_grad_norm: float = float("inf")
    inputs: Sequence[Tensor] = ()


def predicted_peaks(optimizer: BlockOptimizer, step: StepShape, *, partition: Partition | None = None) -> list[Peak]:
    """The peak of a visit to each block, on a copy without memory.

    partition: another division of the same model to try; full training is `partition.undivided`.

    Nothing of the model, the optimizer or the random numbers changes. The batch is real and on the model's device.
    """
    fake = fake_copy(optimizer.partition.model)
    copy = optimizer.over((partition or optimizer.partition).over(fake.model))
    with fake.running(), any_number():
        return list(visited_peaks(copy, step))


def visited_peaks(optimizer: BlockOptimizer, step: StepShape) -> Iterator[Peak]:
    """Trains each block for two steps, in order, and tells the peak of its visit, activation and retirement included.

    On real tensors this is training as any other, and the peak what it really took.
    """
    model = optimizer.partition.model
    with MemoryTracker(logits_width=logits_width(optimizer.partition)) as tracker:
        for block in optimizer.partition:
            tracker.label("frozen", model.parameters())
            tracker.label("buffers", model.buffers())
            tracker.label("inputs", step.inputs)
            _label(tracker, optimizer)
            tracker.reset_peak()
            with optimizer.visit(block), _labelled_gradients(tracker, block):
                tracker.label("active", block.parameters.values())
                for _ in range(2):
                    _take(step, optimizer, tracker)
            _label(tracker, optimizer)
            yield tracker.peak()


def logits_width(partition: Partition) -> int | None:
    """The size of the vocabulary: rows of the last matrix of the chain's last layer."""
    matrices = [p for _, p in partition.chain.layers[-1].named_parameters() if p.dim() == 2]
    return matrices[-1].shape[0] if matrices else None


def _take(step: StepShape, optimizer: BlockOptimizer, tracker: MemoryTracker) -> None:
    for _ in range(min(step.micro_steps, 2)):  # a third is like the second
        step.loss(optimizer.partition.model).backward()
        _label(tracker, optimizer)
    optimizer.clip_grad_norm(step.max_grad_norm)
    optimizer.step()
    _label(tracker, optimizer)
    optimizer.zero_grad()


def _label(tracker: MemoryTracker, optimizer: BlockOptimizer) -> None:
    for part, tensors in optimizer.tensors().items():
        tracker.label(part, tensors)


@contextmanager
def _labelled_gradients(tracker: MemoryTracker, block: Block) -> Iterator[None]:
    """Inside, a weight's gradient counts as one from its birth, also where a master takes it and frees it at once."""
    hooks = [
        weight.register_hook(lambda gradient: tracker.label("gradients", [gradient]))
        for weight in block.parameters.values()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

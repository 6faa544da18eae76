"""Predicts a run's peak memory, by part, before anything is allocated: the run's own steps on a fake-tensor copy.

Each block is activated, trained and retired by the code that trains the real model. A first step on gradients of zero
makes the moments, so that the step that counts is like every later one. `memory/tracker.py` tells what was alive at the
worst moment, by part (`memory/parts.py`).

On the CPU of a machine with a GPU the copy's device and host memory are one, so `host` (what frozen blocks left there)
is kept apart by label. Moments that are kept between visits and the prefix cache are no part of a step, and are left
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from blocktrain.chain.block import Block, Partition
from blocktrain.memory.fake import fake_copy
from blocktrain.memory.parts import ACTIVE, BUFFERS, FROZEN, GRADIENTS, INPUTS
from blocktrain.memory.tracker import MemoryTracker, Peak
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.factory import MetaScalarsReadAsOne
from blocktrain.train.interpolate_step_costs import interpolate, interpolate_missing, measured_positions

Loss = Callable[[nn.Module], Tensor]  # one micro-batch: forward pass and mean loss of the model it is given


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a step does beside the model: `loss` over each of `micro_steps`, then clip to `max_grad_norm`, update.

    inputs: tensors of the batch, counted as such.
    saving: the context manager that saves memory (checkpointing, a chunked loss) around a partition's model.
    """

    loss: Loss
    micro_steps: int = 1
    max_grad_norm: float = float("inf")
    inputs: Sequence[Tensor] = ()
    saving: Callable[[Partition], AbstractContextManager[None]] = lambda _partition: nullcontext()


def predicted_peaks(
    optimizer: BlockOptimizer,
    step: StepShape,
    *,
    partition: Partition | None = None,
    blocks: Sequence[Block] | None = None,
) -> list[Peak]:
    """The peak of a visit to each block, on a copy without memory.

    partition: another division of the same model to try; full training is `partition.undivided`. blocks: what visits
    train, if not each block alone (see `Cyclic.trained`).

    Nothing of the model, the optimizer or the random numbers changes. The batch is real and on the model's device.
    Of blocks that are alike the lowest and the highest are visited, and those between them lie on the line: a peak is
    a maximum of sums that grow evenly with the layers above, so no true one is higher.
    """
    fake = fake_copy(optimizer.partition.model)
    copy = optimizer.rebind((partition or optimizer.partition).rebind(fake.model))
    members = [range(block.members[0], block.members[-1] + 1) for block in blocks or copy.partition]
    trained = [copy.partition.union(mine) for mine in members]
    with fake.running(), MetaScalarsReadAsOne():
        return peaks_of_all(copy, step, blocks=trained)


def peaks_of_all(optimizer: BlockOptimizer, step: StepShape, *, blocks: Sequence[Block]) -> list[Peak]:
    """The peak of a visit to each of `blocks`, of an optimizer over a copy without memory; not all are visited."""
    measured = measured_positions(blocks)
    peaks = visited_peaks(optimizer, step, blocks=[blocks[end] for end in measured])
    return interpolate_missing(blocks, dict(zip(measured, peaks, strict=True)), _between)


def _between(low: Peak, high: Peak, share: float) -> Peak:
    parts = {
        part: interpolate(low.parts.get(part, 0), high.parts.get(part, 0), share)
        for part in {**low.parts, **high.parts}
    }
    return replace(low, parts=dict(sorted(parts.items(), key=lambda item: -item[1])))


def visited_peaks(
    optimizer: BlockOptimizer, step: StepShape, *, blocks: Iterable[Block] | None = None
) -> Iterator[Peak]:
    """Visits each of `blocks` (all, in order) for two steps, the first on gradients of zero; the peaks of these visits,
    activation and retirement included. On real tensors this is real training, and the peak what it took."""
    model = optimizer.partition.model
    width = logits_width(optimizer.partition)
    with step.saving(optimizer.partition), MemoryTracker(logits_width=width) as tracker:
        for block in optimizer.partition if blocks is None else blocks:
            tracker.label(FROZEN, model.parameters())
            tracker.label(BUFFERS, model.buffers())
            tracker.label(INPUTS, step.inputs)
            _label(tracker, optimizer)
            tracker.reset_peak()
            moved = [*block.parameters.values(), *optimizer.tail_of(block).values()]
            with optimizer.visit(block), _labelled_gradients(tracker, moved):
                tracker.label(ACTIVE, block.parameters.values())
                _make_moments(optimizer, block)
                _take(step, optimizer, tracker)
            _label(tracker, optimizer)
            yield tracker.peak()


def logits_width(partition: Partition) -> int | None:
    """The size of the vocabulary: rows of the last matrix of the chain's last layer."""
    matrices = [p for _, p in partition.chain.layers[-1].named_parameters() if p.dim() == 2]
    return matrices[-1].shape[0] if matrices else None


def _make_moments(optimizer: BlockOptimizer, block: Block) -> None:
    """A step on gradients of zero, so that the next one is like all later ones."""
    torch.stack([weight.sum() * 0 for weight in block.parameters.values()]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _take(step: StepShape, optimizer: BlockOptimizer, tracker: MemoryTracker) -> None:
    for _ in range(min(step.micro_steps, 3)):  # the third finds sums in fp32, as all later ones do
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
def _labelled_gradients(tracker: MemoryTracker, weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, a weight's gradient is labelled as soon as autograd creates it, even if a master takes it at once."""
    hooks = [weight.register_hook(lambda gradient: tracker.label(GRADIENTS, [gradient])) for weight in weights]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

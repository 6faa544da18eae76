"""What a step of a method costs, measured on real tensors: a model like the run's is trained for short visits.

FLOPs are those of forward and backward pass, as everywhere in this package; what an optimizer computes (a projection,
an SVD) shows in the step time. Peak memory is that of the worst step, by part (`memory/tracker.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from blocktrain.compare.step import backward_pass, learning_rate_factor
from blocktrain.compare.trainee import Trainee
from blocktrain.memory.flops import FlopCounter
from blocktrain.memory.tracker import MemoryTracker, Peak
from blocktrain.train.context import TrainingContext
from blocktrain.train.memory_profile import logits_width

VISIT = 3  # steps: BAdam's first visit is one shorter, and moments are there from the second step on


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """Of one method: FLOPs of its mean step, its worst step's peak, the most gradients that outlive a backward pass,
    and the most that its optimizer keeps."""

    flops: int
    peak: Peak
    gradient_bytes: int
    optimizer_bytes: int


def measure_cycle(context: TrainingContext, trainee: Trainee, *, visits: int) -> Cycle:
    """Train `trainee`, whose visits last `VISIT` steps, for two cycles of `visits`: one tracked, one counted."""
    steps = VISIT * visits
    kept, gradients, flops = 0, 0, 0
    with MemoryTracker(logits_width=logits_width(context.partition)) as tracker:
        tracker.label("buffers", trainee.model.buffers())
        for step in range(steps):
            tracker.label("frozen", trainee.model.parameters())
            _label(tracker, trainee)
            backward_pass(context, trainee, step)
            _label(tracker, trainee)
            gradients = max(gradients, sum(gradient.nbytes for gradient in trainee.held()["gradients"]))
            _update(context, trainee, step)
            _label(tracker, trainee)
            kept = max(kept, trainee.state_bytes())
        peak = tracker.peak()
    for step in range(steps, 2 * steps):
        with FlopCounter() as counter:
            backward_pass(context, trainee, step)
        flops += counter.total()
        _update(context, trainee, step)
    return Cycle(flops=flops // steps, peak=peak, gradient_bytes=gradients, optimizer_bytes=kept)


def _update(context: TrainingContext, trainee: Trainee, step: int) -> None:
    trainee.clip(context.config.optimizer.max_grad_norm or math.inf)
    trainee.update(learning_rate_factor(context, step))


def _label(tracker: MemoryTracker, trainee: Trainee) -> None:
    for part, tensors in trainee.held().items():
        tracker.label(part, tensors)

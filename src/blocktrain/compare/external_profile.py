"""What a step of another package's method costs, measured on real tensors: a model like the run's is trained for short
visits.

FLOPs are those of forward and backward pass, as everywhere in this package; what an optimizer computes (a projection,
an SVD) shows in the step time. Peak memory is that of the worst step, by part (`memory/tracker.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from blocktrain.compare.external_module import ExternalModule
from blocktrain.memory.flops import FlopCounter
from blocktrain.memory.tracker import MemoryTracker, Peak
from blocktrain.runtime import seed_everything
from blocktrain.train.context import TrainingContext
from blocktrain.train.predict_memory import logits_width

VISIT = 3  # steps: BAdam's first visit is one shorter, and moments are there from the second step on


@dataclass(frozen=True, kw_only=True)
class MethodCosts:
    """A method's FLOPs of its mean step, its worst step's peak, the most gradients that outlive a backward pass, and
    the most that its optimizer keeps."""

    flops: int
    peak: Peak
    gradient_bytes: int
    optimizer_bytes: int


def measure_costs(context: TrainingContext, module: ExternalModule, *, visits: int) -> MethodCosts:
    """Train `module`, whose visits last `VISIT` steps, for two cycles of `visits`: one tracked, one counted."""
    steps = VISIT * visits
    kept, gradients, flops = 0, 0, 0
    with MemoryTracker(logits_width=logits_width(context.partition)) as tracker:
        tracker.label("buffers", module.model.buffers())
        for step in range(steps):
            tracker.label("frozen", module.model.parameters())
            _label(tracker, module)
            _pass(context, module, step)
            _label(tracker, module)
            gradients = max(gradients, sum(tensor.nbytes for tensor in module.method.memory_parts()["gradients"]))
            _update(context, module, step)
            _label(tracker, module)
            kept = max(kept, module.method.state_bytes())
        peak = tracker.peak()
    for step in range(steps, 2 * steps):
        with FlopCounter() as counter:
            _pass(context, module, step)
        flops += counter.total()
        _update(context, module, step)
    return MethodCosts(flops=flops // steps, peak=peak, gradient_bytes=gradients, optimizer_bytes=kept)


def _pass(context: TrainingContext, module: ExternalModule, step: int) -> None:
    """The forward and backward pass of a step, as in `take_step`."""
    seed_everything(context.config.seed, step)
    module.begin_step(step, context.config.learning_rate.factor(step, total=context.total_steps, visit_step=step))
    rows, following = (
        context.rows.step(step=step + ahead, visit=0, sweep=0, visit_step=step + ahead) for ahead in (0, 1)
    )
    module.forward_backward(rows, following)


def _update(context: TrainingContext, module: ExternalModule, step: int) -> None:
    module.clip_grad_norm(context.config.optimizer.max_grad_norm or math.inf)
    module.update(step)


def _label(tracker: MemoryTracker, module: ExternalModule) -> None:
    for part, tensors in module.method.memory_parts().items():
        tracker.label(part, tensors)

"""A run of another package's method: full training's data, evaluation and records, by the one trainer.

What one of its steps costs is measured on real tensors: a model like the run's is trained for short visits. FLOPs are
those of forward and backward pass, as everywhere in this package; what an optimizer computes (a projection, an SVD)
shows in the step time. Peak memory is that of the worst step, by part (`memory/tracker.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from blocktrain.compare.adapter import Adapter
from blocktrain.compare.external_module import ExternalModule
from blocktrain.errors import ConfigError
from blocktrain.memory.flops import FlopCounter
from blocktrain.memory.tracker import MemoryTracker, Peak
from blocktrain.records.log import read_events
from blocktrain.records.run_records import MemoryPeaks, Opening, PeakMemory, RunHeader, StepCosts
from blocktrain.runtime import environment, seed_everything
from blocktrain.schedule import Cyclic
from blocktrain.train.config import RunConfig
from blocktrain.train.config_tables import ScheduleConfig
from blocktrain.train.context import TrainingContext, build
from blocktrain.train.interrupt import stop_requests
from blocktrain.train.predict_memory import logits_width
from blocktrain.train.run_folder import RunFolder
from blocktrain.train.step_costs import count_opening, run_header
from blocktrain.train.technique import Techniques
from blocktrain.train.techniques.memory_saving import MemorySaving, saving_memory
from blocktrain.train.train_module import Prepared, Setup
from blocktrain.train.trainer import Listener, Trainer
from blocktrain.units import Duration

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
    max_norm = context.config.optimizer.max_grad_norm or math.inf
    with MemoryTracker(logits_width=logits_width(context.partition)) as tracker:
        tracker.label("buffers", module.model.buffers())
        for step in range(steps):
            tracker.label("frozen", module.model.parameters())
            _label(tracker, module)
            _pass(context, module, step)
            _label(tracker, module)
            gradients = max(gradients, sum(tensor.nbytes for tensor in module.method.memory_parts()["gradients"]))
            module.clip_grad_norm(max_norm)
            module.update(step)
            _label(tracker, module)
            kept = max(kept, module.method.state_bytes())
        peak = tracker.peak()
    for step in range(steps, 2 * steps):
        with FlopCounter() as counter:
            _pass(context, module, step)
        flops += counter.total()
        module.clip_grad_norm(max_norm)
        module.update(step)
    return MethodCosts(flops=flops // steps, peak=peak, gradient_bytes=gradients, optimizer_bytes=kept)


def _pass(context: TrainingContext, module: ExternalModule, step: int) -> None:
    """The forward and backward pass of a step, as in `take_step`."""
    seed_everything(context.config.seed, step)
    module.begin_step(step, context.config.learning_rate.factor(step, total=context.total_steps, visit_step=step))
    rows, following = (context.rows.step(step=at, visit=0, sweep=0, visit_step=at) for at in (step, step + 1))
    module.forward_backward(rows, following)


def _label(tracker: MemoryTracker, module: ExternalModule) -> None:
    for part, tensors in module.method.memory_parts().items():
        tracker.label(part, tensors)


def external_setup(adapter: Adapter, costs: MethodCosts, full: Opening) -> Setup:
    """How the method of `adapter` is trained.

    costs: measured before the run, on a model of its own. full: the opening records of full training, counted on a
    model of its own.
    """

    def header(context: TrainingContext, method: str) -> RunHeader:
        """Full training's, with the method's own optimizer."""
        name = adapter.optimizer or context.config.optimizer.name
        header = replace(run_header(context, method), optimizer=name)
        return replace(header, micro_rows=None) if header.micro_rows == "auto" else header  # nothing is decided here

    def opening(context: TrainingContext, header: RunHeader, micro_rows: int | None) -> Opening:
        """Full training's, with the method's measured figures where its own are different."""
        parts = dict(costs.peak.parts)
        flops = replace(full.costs.flops, blocks=(costs.flops,), theory_full=0, theory_blocks=())
        by_arithmetic = {
            "weights": parts.get("frozen", 0) + parts.get("buffers", 0),
            "master": parts.get("master", 0),
            "gradients": costs.gradient_bytes,
            "moments": costs.optimizer_bytes,
            "activations": parts.get("activations", 0) + parts.get("logits", 0),
        }
        memory = replace(full.costs.memory, blocks=(by_arithmetic,))
        peak = PeakMemory(parts=parts, operation=costs.peak.operation)
        return Opening(
            header=header,
            costs=StepCosts(flops=flops, memory=memory),
            memory=MemoryPeaks(blocks=(peak,), full=full.memory.full),
        )

    def prepare(context: TrainingContext, opening: Opening, folder: Path) -> Prepared:
        techniques = Techniques({"memory_saving": MemorySaving(context.partition, context.config.memory)})
        method = adapter.build(context, None)
        module = ExternalModule(context, method, techniques, known_state_bytes=costs.optimizer_bytes)
        return Prepared(context=context, module=module, techniques=techniques)

    return Setup(header=header, opening=opening, prepare=prepare)


def train_external(
    config: RunConfig,
    adapter: Adapter,
    out: Path,
    *,
    method: str,
    listeners: Sequence[Listener] = (),
    command: str = "",
) -> RunFolder:
    """Train as `config` says, by `adapter`, into `out`. What an interrupted run left there is replaced; a finished run
    is kept."""
    folder = RunFolder(out)
    if is_finished(folder):
        return folder
    # One after the other, so that only one model is in memory at a time.
    setup = external_setup(adapter, _measured(config, adapter, out), _opening_of_full(config, method))
    context = external_context(config, out)
    with folder.lock(), stop_requests() as stop:
        for file in (out / "run.json", folder.events):
            file.unlink(missing_ok=True)
        folder.create(config, method=method, environment=environment(context.device), command=command, resumable=False)
        Trainer(context=context, folder=folder, setup=setup, method=method, listeners=listeners, stop=stop).run()
    return folder


def is_finished(folder: RunFolder) -> bool:
    """Whether the folder holds a finished run."""
    return folder.events.exists() and any(event["kind"] == "end" for event in read_events(folder.events))


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-exact": torch.bfloat16}


def external_context(config: RunConfig, out: Path) -> TrainingContext:
    """A run whose model is an ordinary, fully trainable one in the precision it computes in. It is one visit long."""
    if config.precision not in PRECISIONS:
        raise ConfigError(
            f"precision '{config.precision}' is for block coordinate descent; compare in {', '.join(PRECISIONS)}"
        )
    context = build(replace(config, precision="fp32", memory=replace(config.memory, frozen="device")), out)
    context.optimizer.close()
    context.model.to(PRECISIONS[config.precision]).requires_grad_(True).train()
    assert context.total_steps is not None, "a comparison has a known number of steps"
    whole_run = Cyclic(visit=Duration.steps(context.total_steps), sweeps=1)
    return replace(context, config=config, partition=context.partition.undivided, schedule=whole_run)


def _measured(config: RunConfig, adapter: Adapter, out: Path) -> MethodCosts:
    context = external_context(config, out)
    visits = adapter.cycle(context)
    with saving_memory(context.partition, context.config.memory):
        module = ExternalModule(context, adapter.build(context, VISIT), Techniques())
        return measure_costs(context, module, visits=visits)


def _opening_of_full(config: RunConfig, method: str) -> Opening:
    """Full training of the same model and what it costs, with all rows at a time where the size is left open."""
    batch = replace(config.batch, micro_rows=None) if config.batch.micro_rows == "auto" else config.batch
    full = replace(
        config,
        precision="fp32",
        batch=batch,
        blocks=replace(config.blocks, count=1, largest=None, patterns=None),
        schedule=ScheduleConfig(visit=config.schedule.visit, sweeps=config.schedule.sweeps),
    )
    context = build(full, Path())
    return count_opening(context, run_header(context, method))

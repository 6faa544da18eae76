"""A run of a method that is not ours: the data, the evaluation, the records and the report of a run of ours.

Not checkpointed: most of these packages cannot save what they hold. A run that was interrupted begins anew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from blocktrain.chain.activation import evaluating
from blocktrain.compare.peers import Peer
from blocktrain.compare.profile import VISIT, Cycle, measure_cycle
from blocktrain.compare.step import take_step
from blocktrain.compare.trainee import Trainee
from blocktrain.errors import ConfigError, Interrupted
from blocktrain.records.log import Event, EventLog, read_events
from blocktrain.runtime import environment, peak_memory_bytes, reset_peak_memory, seed_everything
from blocktrain.train.config import RunConfig
from blocktrain.train.context import TrainingContext, build
from blocktrain.train.interrupt import StopRequest, stop_requests
from blocktrain.train.memory_saving import saving_memory
from blocktrain.train.run_folder import RunFolder
from blocktrain.train.run_header import opening_records
from blocktrain.train.score import score
from blocktrain.train.trainer import Listener

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-exact": torch.bfloat16}


def train_peer(
    config: RunConfig,
    peer: Peer,
    out: Path,
    *,
    method: str,
    listeners: Sequence[Listener] = (),
    command: str = "",
) -> RunFolder:
    """Train as `config` says, by `peer`, into `out`; what an interrupted run left there is replaced, a finished one
    is kept."""
    folder = RunFolder(out)
    if finished(folder):
        return folder
    measured = _measure(config, peer, out)
    opening = _opening(config, peer, method, measured)
    context = whole_context(config, out)
    trainee = peer.build(context, None)
    with folder.lock(), saving_memory(context.partition, context.config.memory), stop_requests() as stop:
        for file in (out / "run.json", folder.events):
            file.unlink(missing_ok=True)
        folder.create(config, method=method, environment=environment(context.device), command=command, resumable=False)
        log = EventLog(folder.events, length=0)
        try:
            _Run(context=context, trainee=trainee, log=log, listeners=listeners, stop=stop).run(opening, measured)
        finally:
            log.close()
    return folder


def finished(folder: RunFolder) -> bool:
    """Whether the folder holds a run that came to its end."""
    return folder.events.exists() and any(event["kind"] == "end" for event in read_events(folder.events))


def whole_context(config: RunConfig, out: Path) -> TrainingContext:
    """A context whose model is an ordinary one, all of it trainable, in the precision it computes in."""
    if config.precision not in PRECISIONS:
        raise ConfigError(
            f"precision '{config.precision}' is for block coordinate descent; compare in {', '.join(PRECISIONS)}"
        )
    context = build(replace(config, precision="fp32", memory=replace(config.memory, frozen="device")), out)
    context.optimizer.close()
    context.model.to(PRECISIONS[config.precision]).requires_grad_(True).train()
    return replace(context, config=replace(context.config, precision=config.precision))


def _measure(config: RunConfig, peer: Peer, out: Path) -> Cycle:
    context = whole_context(config, out)
    with saving_memory(context.partition, context.config.memory):
        trainee = peer.build(context, VISIT)
        visits = peer.cycle(context)
        return measure_cycle(context, trainee, visits=visits)


def _opening(config: RunConfig, peer: Peer, method: str, measured: Cycle) -> list[Event]:
    """The opening records of full training, with this method's figures where its own are."""
    batch = replace(config.batch, micro_rows=None) if config.batch.micro_rows == "auto" else config.batch
    blocks = replace(config.blocks, count=1, largest=None, patterns=None)
    schedule = replace(config.schedule, order="ascending")  # a list would name blocks that there are not
    whole = replace(config, precision="fp32", batch=batch, blocks=blocks, schedule=schedule)
    told = {event["kind"]: event for event in opening_records(build(whole, Path()), method)}
    header, cost, memory = told["run"], told["cost"], told["memory"]
    parts = dict(measured.peak.parts)
    header |= {"optimizer": peer.optimizer or config.optimizer.name, "precision": config.precision}
    cost["flops"] |= {"blocks": [measured.flops], "theory_full": 0, "theory_blocks": []}
    cost["memory"]["blocks"] = [
        {
            "weights": parts.get("frozen", 0) + parts.get("buffers", 0),
            "master": parts.get("master", 0),
            "gradients": measured.gradient_bytes,
            "optimizer": measured.optimizer_bytes,
            "activations": sum(parts.get(part, 0) for part in ("activations", "logits")),
        }
    ]
    memory["blocks"] = [{"parts": parts, "host_bytes": 0, "operation": measured.peak.operation}]
    return [header, cost, memory]


@dataclass(kw_only=True)
class _Run:
    """One run on its way."""

    context: TrainingContext
    trainee: Trainee
    log: EventLog
    listeners: Sequence[Listener]
    stop: StopRequest
    step: int = 0
    started: float = 0.0
    score: dict[str, Any] = field(default_factory=dict)

    def run(self, opening: list[Event], measured: Cycle) -> None:
        """Step and evaluate to the end."""
        context, config = self.context, self.context.config
        evaluate_every = config.evaluation.every.in_steps(context.geometry)
        for event in opening:
            self._emit(event)
        reset_peak_memory(context.device)
        seed_everything(config.seed)
        self.started = time.perf_counter()
        self._evaluate()
        over, evaluated = None, 0
        while over is None:
            result = take_step(context, self.trainee, self.step)
            self.step += 1
            if self.step % config.log_every == 0:
                self._emit({"kind": "step", **self._now(), "visit": 0, "sweep": 0, "block": 0, **result.to_event()})
            if self.step % evaluate_every == 0:
                self._evaluate()
                evaluated = self.step
            validation = self.score["loss"] if evaluated == self.step else None
            seconds = time.perf_counter() - self.started
            over = config.stop.reached(
                step=self.step, seconds=seconds, validation_loss=validation, geometry=context.geometry
            )
            if over is None and self.stop.signal_number is not None:
                raise Interrupted(f"stopped at step {self.step}", signal_number=self.stop.signal_number)
        if evaluated != self.step:
            self._evaluate()
        kept = max(measured.optimizer_bytes, self.trainee.state_bytes())
        figures = {"optimizer_bytes": kept, "flops": measured.flops * self.step}
        figures["peak_memory_bytes"] = peak_memory_bytes(context.device)
        ended = {"kind": "end", "reason": over, "steps": self.step, "sweeps": 1, **self._now(), **self.score, **figures}
        self._emit(ended)

    def _evaluate(self) -> None:
        settings = self.context.config.evaluation
        with evaluating(self.trainee.model):
            scored = score(
                self.context.task,
                self.trainee.model,
                rows=settings.rows,
                batch_rows=settings.batch_rows,
                device=self.context.device,
            )
        self.score = scored.to_event()
        self._emit({"kind": "evaluation", **self._now(), "visit": 0, "block": 0, **self.score})

    def _now(self) -> dict[str, Any]:
        seconds = round(time.perf_counter() - self.started, 4)
        return {"step": self.step, "tokens": self.step * self.context.geometry.tokens_per_step, "seconds": seconds}

    def _emit(self, event: Event) -> None:
        self.log.append(event)
        for listener in self.listeners:
            listener(event)

"""The loop: Algorithm 1 of the paper with everything a long run needs around it.

    for visit in schedule:                    which block, in which order
        with optimizer.visit(block):          freeze, unfreeze, build, restore
            until the visit is over:
                one step                      step.py
                evaluate when due             score.py, generation_eval.py
                ask the rules                 stopping.py
                checkpoint when due           checkpoint.py

What a step does is a function of the weights, the seed and the step's number: data rows, augmentation and dropout
follow from them. So a run that was killed and resumed ends as one that was not, bit for bit, and so does its log, but
for the clock, peak memory, and what a prefix cache did (rows stored in memory are gone with the process).

Every process of a run goes through this loop. What they decide on is the same for all, or rank 0's; rank 0 writes.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blocktrain.chain.activation import evaluating
from blocktrain.chain.chain import Layer
from blocktrain.errors import CheckpointError, Interrupted
from blocktrain.modules.kernels import apply_liger, choose_kernels
from blocktrain.records.log import Event, EventLog, NoLog, read_events
from blocktrain.runtime import peak_memory_bytes, reset_peak_memory
from blocktrain.schedule import Visit
from blocktrain.stopping import Observation
from blocktrain.train.checkpoint import CheckpointHeader, checkpoints, load_checkpoint, logged_bytes
from blocktrain.train.context import TrainingContext
from blocktrain.train.generation_eval import ask
from blocktrain.train.growth import begin_layers, left_out, running_without
from blocktrain.train.interrupt import StopRequest
from blocktrain.train.layout import Layout, lay_out, write_checkpoint
from blocktrain.train.memory_saving import saving_memory
from blocktrain.train.oom_advice import advise_when_out_of_memory
from blocktrain.train.prefix_runner import PrefixRunner
from blocktrain.train.progress import Progress
from blocktrain.train.run_folder import RunFolder
from blocktrain.train.run_header import logged_opening, opening_records, step_flops
from blocktrain.train.score import score
from blocktrain.train.step import StepResult, train_step

Listener = Callable[[Event], None]


@dataclass(kw_only=True, eq=False)
class Trainer:
    """A context on its way: where it stands, and where it writes."""

    context: TrainingContext
    folder: RunFolder
    method: str = "bcd"
    listeners: Sequence[Listener] = ()
    stop: StopRequest = field(default_factory=StopRequest)
    progress: Progress = field(default_factory=Progress)
    _prefixed: PrefixRunner = field(init=False)
    _layout: Layout = field(init=False)
    _log: EventLog | NoLog = field(default_factory=NoLog)
    _memory: Event = field(default_factory=dict)  # the record of that name
    _peak_bytes: int = 0  # of the visits before
    _started: float = 0.0
    _step_flops: dict[tuple[int, int], int] = field(default_factory=dict)  # by block, and layers left out

    def run(self) -> None:
        """Train to the end, from the newest checkpoint if there is one. Raises `Interrupted` after a signal, with a
        checkpoint written; any other error leaves the last checkpoint as it was."""
        started = time.perf_counter()
        ranks = self.context.ranks
        newest = ranks.rank0_broadcast(lambda: [path.name for path in checkpoints(self.folder.checkpoints)[-1:]])
        length = ranks.rank0_broadcast(lambda: logged_bytes(self.folder.checkpoints / newest[0]) if newest else 0)
        logged = ranks.rank0_broadcast(lambda: logged_opening(self.folder.events, length, self.context, self.method))
        opening = logged or ranks.rank0_broadcast(lambda: opening_records(self.context, self.method))
        if newest:
            self._restore(newest[0])  # after steps were rehearsed: nothing of them is left
        self._started = started - self.progress.seconds
        if ranks.is_rank0:
            self._log = EventLog(self.folder.events, length=length)
            self.folder.add_session(step=self.progress.step, processes=self.context.ranks.size)
        try:
            self._open(opening, logged=bool(logged))
            if self.context.ranks.is_rank0:
                self.folder.replace_config(self.context.config)  # of a run that was moved, now that it can be
            saving = saving_memory(self.context.partition, self.context.config.memory)
            with saving, self._prefixed, advise_when_out_of_memory(self.context, self._memory, "between steps"):
                self._train()
        finally:
            self._log.close()

    def _open(self, opening: Sequence[Event], *, logged: bool) -> None:
        """Lay the work out over the processes, as the opening records say; until here, each has all of it."""
        told = {event["kind"]: event for event in opening}
        micro_rows = told.get("micro_batch", {}).get("micro_rows", self.context.micro_rows)
        self.context = replace(self.context, micro_rows=micro_rows)
        self._memory = told["memory"]
        self._step_flops = step_flops(told["cost"])
        forward_flops = told["cost"]["flops"]["forward_layers"]
        self._layout = lay_out(self.context, self.folder.path, forward_flops)
        self.context = self._layout.context
        self._prefixed = PrefixRunner(self.context, self.folder.path, forward_flops, before=self.progress.cached)
        for event in opening:
            (self._tell if logged else self._emit)(event)
        if choose_kernels(self.context.config.memory.kernels, self.context.device) == "liger":
            apply_liger(self.context.model)  # after counting: its kernels run on no tensor without memory

    # -- the run --------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        context, progress, parallel = self.context, self.progress, self._layout.parallel
        if progress.evaluated is None:
            self._evaluate_and_log()
        for visit in context.schedule.visits(context.partition, start=progress.visit):
            if progress.run_over:
                break
            reset_peak_memory(context.device)
            if progress.visit_step == 0:
                begin_layers(context, visit)
            with context.optimizer.visit(parallel.share(visit.block)), parallel.visit(context.optimizer.in_visit):
                following = next(context.schedule.visits(context.partition, start=visit.index + 1), None)
                if following is not None:
                    context.optimizer.expect(following.block)
                self._visit(visit)
            self._retire(visit)
        self._finish()

    def _visit(self, visit: Visit) -> None:
        """Steps until the visit or the run is over."""
        progress, config, geometry = self.progress, self.context.config, self.context.geometry
        outside = left_out(self.context, visit)
        flops = self._step_flops[visit.block.index, len(outside)]
        evaluate_every, save_every = (
            config.evaluation.every.in_steps(geometry),
            config.checkpoint.every.in_steps(geometry),
        )
        fresh = progress.visit_step == 0
        if fresh:
            progress.rule, progress.sweep = self.context.rule.start(), visit.sweep
            grown = {"left_out": len(outside), "step_flops": flops} if outside else {}
            self._emit({"kind": "visit", **self._place(visit), **self._now(), **grown})
        if not progress.visit_over:  # a resumed visit may have nothing left to do
            with running_without(self.context, outside):
                self._open_prefix(visit, outside, fresh=fresh)
        while not (progress.visit_over or progress.run_over):
            doing = f"at step {progress.step + 1} in {visit.block}"
            with advise_when_out_of_memory(self.context, self._memory, doing), running_without(self.context, outside):
                place = {"step": progress.step, "visit_step": progress.visit_step}
                result = train_step(self.context, self._prefixed, self._layout.parallel, visit, **place)
            self._advance(visit, result, flops)
            evaluated = progress.step % evaluate_every == 0
            if evaluated:
                self._evaluate_and_log()
            asked, seconds = self._agree()
            self._ask_rules(visit, result, evaluated, seconds)
            if progress.run_over:  # the run's last checkpoint comes after its last records
                break
            if asked and self._layout.parallel.settled:
                self._save()
                self._interrupted(asked)
            if progress.step % save_every == 0:
                self._save()
        held = self.context.ranks.all_gather([self.context.optimizer.state_bytes()])
        progress.optimizer_bytes = max(progress.optimizer_bytes, *(int(count) for (count,) in held))
        did = self._prefixed.close_visit()
        if did is not None:
            self._emit({**did, **self._place(visit), **self._now()})

    def _open_prefix(self, visit: Visit, outside: Sequence[Layer], *, fresh: bool) -> None:
        """Decide on a prefix cache for the visit; what was decided is logged once, not at every resume."""
        first = self.context.ranks.is_rank0 and not fresh
        logged = [e for e in read_events(self.folder.events) if e["kind"] == "cache"] if first else []
        before = next((event for event in reversed(logged) if event["visit"] == visit.index), None)
        decided = self._prefixed.open(visit, decided=before, without=outside)
        if decided is not None:
            (self._emit if fresh else self._tell)({**decided, **self._place(visit), **self._now()})

    def _advance(self, visit: Visit, result: StepResult, flops: int) -> None:
        """Count a step and log it."""
        progress = self.progress
        progress.step += 1
        progress.visit_step += 1
        progress.tokens += self.context.geometry.tokens_per_step
        progress.flops += flops - result.flops_saved
        event = {"kind": "step", **self._now(), **self._place(visit), **result.to_event()}
        logged = progress.step % self.context.config.log_every == 0 or result.skipped
        (self._emit if logged else self._tell)(event)

    def _agree(self) -> tuple[int, float]:
        """The signal that a rank got, 0 for none, and rank 0's clock."""
        told = self.context.ranks.all_gather([self.stop.signal_number or 0, self._seconds()])
        return int(max(signal for signal, _ in told)), told[0][1]

    def _ask_rules(self, visit: Visit, result: StepResult, evaluated: bool, seconds: float) -> None:
        """Is the visit over? Is the run?"""
        context, progress = self.context, self.progress
        validation = progress.score["loss"] if evaluated else None
        seen = Observation(visit_step=progress.visit_step, loss=result.loss, validation_loss=validation)
        if not result.skipped:
            progress.rule, progress.visit_over = context.rule.update(progress.rule, seen, context.geometry)
        if progress.visit_over is None and progress.visit_step >= visit.duration.in_steps(context.geometry):
            progress.visit_over = f"{visit.duration} done"
        progress.run_over = context.config.stop.reached(
            step=progress.step, seconds=seconds, validation_loss=validation, geometry=context.geometry
        )

    def _retire(self, visit: Visit) -> None:
        progress = self.progress
        reason = progress.visit_over or progress.run_over
        peak = peak_memory_bytes(self.context.device)
        self._peak_bytes = max(self._peak_bytes, peak)
        where = {**self._place(visit), **self._now()}
        self._emit({"kind": "retire", **where, "reason": reason, "peak_memory_bytes": peak})
        progress.visit, progress.visit_step, progress.visit_over = visit.index + 1, 0, None

    def _finish(self) -> None:
        """The last evaluation, checkpoint and record."""
        progress = self.progress
        progress.run_over = progress.run_over or f"{self.context.schedule.sweeps} sweeps done"
        if progress.evaluated != progress.step:
            self._evaluate_and_log()
        self._save()
        self._emit(
            {
                "kind": "end",
                "reason": progress.run_over,
                "steps": progress.step,
                "tokens": progress.tokens,
                "sweeps": progress.sweep + 1,
                "seconds": self._seconds(),
                **progress.score,
                "optimizer_bytes": progress.optimizer_bytes,
                "flops": progress.flops,
                "peak_memory_bytes": max(self._peak_bytes, peak_memory_bytes(self.context.device)),
            }
        )

    # -- its parts ------------------------------------------------------------------------------------------------

    def _evaluate_and_log(self) -> None:
        """Score the model as it is now."""
        context, progress, settings = self.context, self.progress, self.context.config.evaluation
        self._layout.parallel.settle()
        doing = f"while evaluating {settings.batch_rows} rows at a time (evaluation.batch_rows)"
        with evaluating(context.model), advise_when_out_of_memory(context, self._memory, doing):
            scored = score(
                context.task,
                context.model,
                rows=settings.rows,
                batch_rows=settings.batch_rows,
                device=context.device,
                ranks=context.ranks,
            )
            answers = ask(context)
        if answers:
            scored = replace(scored, exact_match=sum(answer.correct for answer in answers) / len(answers))
        progress.evaluated, progress.score = progress.step, scored.to_event()
        block = context.optimizer.active
        self._emit(
            {
                "kind": "evaluation",
                **self._now(),
                "visit": progress.visit,
                "block": None if block is None else block.index,
                **progress.score,
            }
        )
        for answer in answers:
            self._emit({"kind": "sample", "step": progress.step, **answer.to_event()})

    def _save(self) -> None:
        self._log.sync()
        self.progress.cached, self.progress.seconds = self._prefixed.did(), self._seconds()
        saved = CheckpointHeader(
            progress=self.progress, log_bytes=self._log.length(), data=self.context.task.fingerprint
        )
        write_checkpoint(self._layout, self.folder.checkpoints, saved, keep=self.context.config.checkpoint.keep)

    def _restore(self, name: str) -> None:
        """Load a checkpoint."""
        found = self.folder.checkpoints / name
        saved = load_checkpoint(found, self.context.partition, self.context.optimizer)
        if saved.data != self.context.task.fingerprint:
            raise CheckpointError(
                f"the training data are not those of '{found}' any more, so its rows cannot be gone on with; "
                "restore them, or train anew with another --out"
            )
        self.progress = saved.progress

    def _interrupted(self, number: int) -> None:
        raise Interrupted(
            f"stopped at step {self.progress.step}; go on with: blocktrain resume {shlex.quote(str(self.folder.path))}",
            signal_number=number,
        )

    def _seconds(self) -> float:
        return round(time.perf_counter() - self._started, 4)

    def _now(self) -> dict[str, Any]:
        return {"step": self.progress.step, "tokens": self.progress.tokens, "seconds": self._seconds()}

    @staticmethod
    def _place(visit: Visit) -> dict[str, int]:
        return {"visit": visit.index, "sweep": visit.sweep, "block": visit.block.index}

    def _emit(self, event: Event) -> None:
        """Log an event and tell it to the listeners."""
        self._log.append(event)
        self._tell(event)

    def _tell(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)

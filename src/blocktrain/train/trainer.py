"""The trainer: Algorithm 1 of the paper with evaluation, stopping, checkpoints and the log around it.

    for visit in schedule:                    which block, in which order
        with module.visit(visit):             freeze, unfreeze, build, restore          train_module.py
            until the visit is over:
                one step                      step.py
                evaluate when due             evaluate.py
                ask the stopping rules        stopping.py
                checkpoint when due           checkpoint.py

What a step does is a function of the weights, the seed and the step's number: data rows, augmentation and dropout
follow from them. So a run that was killed and resumed ends as one that was not, bit for bit, and so does its log, but
for the clock, peak memory, and what a prefix cache did (rows stored in memory are gone with the process).

Every rank goes through this loop. What they decide on is the same on all, or rank 0's; rank 0 writes. Records go out
and never come back: a run resumes from its checkpoint alone.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from blocktrain.errors import CheckpointError, Interrupted, NonFiniteError
from blocktrain.records.log import EventLog, NoLog
from blocktrain.records.run_records import Evaluation, Opening, Record, RunEnd, Step, VisitEnd, VisitStart
from blocktrain.runtime import peak_memory_bytes, peak_reserved_bytes, reset_peak_memory
from blocktrain.schedule import Visit
from blocktrain.stopping import Observation, best_evaluation
from blocktrain.train.checkpoint import CheckpointHeader, TrainerState, checkpoints, load_checkpoint, read_header
from blocktrain.train.context import TrainingContext
from blocktrain.train.evaluate import evaluate
from blocktrain.train.gathered_state import write_checkpoint
from blocktrain.train.interrupt import StopRequest
from blocktrain.train.oom_advice import advise_when_out_of_memory
from blocktrain.train.run_folder import RunFolder
from blocktrain.train.step import StepResult, take_step
from blocktrain.train.technique import Position
from blocktrain.train.train_module import Prepared, Setup

log = logging.getLogger(__name__)

Listener = Callable[[Record], None]


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Trains `context` in `folder`, from the newest checkpoint if there is one.

    setup: makes the opening records and the train module of the run's method.
    method: what the records call it.
    listeners: called with every record; rank 0 only.
    accepts_changed_data: whether a run goes on where its data are not those that it was trained on.
    """

    context: TrainingContext
    folder: RunFolder
    setup: Setup
    method: str = "bcd"
    listeners: Sequence[Listener] = ()
    accepts_changed_data: bool = False
    stop: StopRequest = field(default_factory=StopRequest)
    progress: TrainerState = field(default_factory=TrainerState)
    _prepared: Prepared = field(init=False)
    _opening: Opening = field(init=False)
    _log: EventLog | NoLog = field(default_factory=NoLog)
    _peak_bytes: int = 0  # of the visits before
    _started: float = 0.0

    def run(self) -> None:
        """Train to the end. Raises `Interrupted` after a signal, with a checkpoint written; any other error leaves the
        last checkpoint as it was."""
        started = time.perf_counter()
        ranks = self.context.ranks
        newest = ranks.rank0_broadcast(lambda: [path.name for path in checkpoints(self.folder.checkpoints)[-1:]])
        path = self.folder.checkpoints / newest[0] if newest else None
        saved = None if path is None else read_header(path)
        if saved is not None:
            self._require_unchanged(saved)
        is_moved = self._open(saved)
        if path is not None:
            saved = load_checkpoint(path, self.context.partition, self.context.optimizer)
            self.progress = replace(saved.progress, header=self.progress.header, micro_rows=self.progress.micro_rows)
        self._started = started - self.progress.seconds
        if ranks.is_rank0:
            self._log = EventLog(self.folder.events, length=0 if saved is None else saved.log_bytes)
            self.folder.add_session(step=self.progress.step, processes=ranks.size)
        try:
            self._prepared = self.setup.prepare(self.context, self._opening, self.folder.path)
            self.context = self._prepared.context
            self._prepared.techniques.load_state(self.progress.techniques)
            for record in self._opening.records:
                self._emit(record, is_logged=saved is None or is_moved)
            if ranks.is_rank0:
                self.folder.replace_config(self.context.config)  # of a run that was moved, now that it works
            with self._prepared.techniques.around_run(), self._advise("between steps"):
                self._train()
        finally:
            self._log.close()

    def _require_unchanged(self, saved: CheckpointHeader) -> None:
        """Raise `CheckpointError` where the configuration or the data are not those of the checkpoint."""
        if changed := self.context.config.changes_since(saved.config):
            raise CheckpointError(
                f"'{self.folder.path / 'run.json'}' has another {', '.join(changed)} than the newest checkpoint; "
                "restore it, or start a new run with another --out"
            )
        if saved.data == self.context.data.fingerprint:
            return
        if not self.accepts_changed_data:
            raise CheckpointError(
                f"the training data have changed since the newest checkpoint of '{self.folder.path}' was written; "
                "restore them, continue on the data as they are with --accept-changed-data, or start a new run with "
                "another --out"
            )
        log.warning("the training data have changed since the newest checkpoint; the run continues on them as they are")

    def _open(self, saved: CheckpointHeader | None) -> bool:
        """Count what a step costs, before any weight is loaded: the trial steps leave nothing behind. Returns whether
        the run continues with another device, precision or layout than it was saved with."""
        context, before = self.context, None if saved is None else saved.progress
        header = self.setup.header(context, self.method)
        is_moved = before is not None and before.header != header.to_event()
        decided = before.micro_rows if before is not None and not is_moved else None
        events = context.ranks.rank0_broadcast(lambda: self.setup.opening(context, header, decided).to_events())
        self._opening = Opening.from_events(events)
        if self._opening.micro_batch is not None:
            decided = self._opening.micro_batch.micro_rows
        if decided is not None:
            self.context = replace(context, micro_rows=decided)
        self.progress = replace(self.progress, header=header.to_event(), micro_rows=decided)
        return is_moved

    # -- the run --------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Evaluate, go through the visits, then write the last evaluation, checkpoint and record."""
        context, progress = self.context, self.progress
        if progress.evaluated is None:
            self._evaluate()
        for visit in context.schedule.visits(context.partition, start=progress.visit):
            if progress.run_over:
                break
            reset_peak_memory(context.device)
            if progress.visit_step == 0:
                self._prepared.techniques.before_visit(visit)
            following = next(context.schedule.visits(context.partition, start=visit.index + 1), None)
            with self._prepared.module.visit(visit, following):
                self._visit(visit)
            peak = peak_memory_bytes(context.device)
            self._peak_bytes = max(self._peak_bytes, peak)
            reason = progress.visit_over or progress.run_over or ""
            self._emit(
                VisitEnd(
                    **self._position(visit).fields(),
                    reason=reason,
                    peak_memory_bytes=peak,
                    peak_reserved_bytes=peak_reserved_bytes(context.device),
                )
            )
            progress.visit, progress.visit_step, progress.visit_over = visit.index + 1, 0, None
        progress.run_over = progress.run_over or f"{progress.sweep + 1} sweeps done"
        if progress.evaluated != progress.step:
            self._evaluate()
        self._save()
        self._emit(
            RunEnd(
                reason=progress.run_over,
                steps=progress.step,
                tokens=progress.tokens,
                sweeps=progress.sweep + 1,
                seconds=self._seconds(),
                **progress.score,
                optimizer_bytes=progress.optimizer_bytes,
                flops=progress.flops,
                peak_memory_bytes=max(self._peak_bytes, peak_memory_bytes(context.device)),
            )
        )
        self._require_finite_result()

    def _require_finite_result(self) -> None:
        """Raise `NonFiniteError` for a run that has ended without a usable model; its log is complete."""
        progress, folder = self.progress, self.folder.path
        if not progress.has_finite_loss:
            what = f"its validation loss is {progress.score['loss']}"
        elif 2 * progress.skipped > progress.step:
            what = f"{progress.skipped} of its {progress.step} steps were skipped because they were not finite"
        else:
            return
        raise NonFiniteError(
            f"the run in '{folder}' has ended, but {what}; start a new run with a lower optimizer.lr, a longer "
            "learning_rate.warmup_steps or optimizer.max_grad_norm, under another --out"
        )

    def _visit(self, visit: Visit) -> None:
        """Steps until the visit or the run is over."""
        progress, config, geometry = self.progress, self.context.config, self.context.geometry
        module, techniques = self._prepared.module, self._prepared.techniques
        evaluate_every = config.evaluation.every.in_steps(geometry)
        save_every = config.checkpoint.every.in_steps(geometry)
        left_out = len(techniques.layers_left_out(visit))
        step_flops = self._opening.costs.step_flops(visit.block.index, left_out)
        is_fresh = progress.visit_step == 0
        if is_fresh:
            progress.rule, progress.sweep = self.context.rule.start(), visit.sweep
            grown = {"left_out": left_out, "step_flops": step_flops} if left_out else {}
            self._emit(VisitStart(**self._position(visit).fields(), **grown))
        if not progress.visit_over:  # a resumed visit may have no step left
            for record in techniques.open_visit(visit, self._position(visit)):
                self._emit(record, is_logged=is_fresh)
        while not (progress.visit_over or progress.run_over):
            with self._advise(f"at step {progress.step + 1} in {visit.block}"), techniques.around_step(visit):
                place = {"step": progress.step, "visit_step": progress.visit_step}
                result = take_step(self.context, module, techniques, visit, **place)
            self._count(visit, result, step_flops)
            is_evaluated = progress.step % evaluate_every == 0
            if is_evaluated:
                self._evaluate(visit.block.index)
            # The ranks stop together: at a signal that any of them was sent, and by rank 0's clock.
            gathered = self.context.ranks.all_gather([self.stop.signal_number or 0, self._seconds()])
            signal_number = int(max(number for number, _ in gathered))
            self._check_stopping(visit, result, is_evaluated, seconds=gathered[0][1])
            if progress.run_over:  # the run's last checkpoint comes after its last records
                break
            if signal_number and module.is_settled:
                saved = self._save()
                resume_hint = f"blocktrain resume {shlex.quote(str(self.folder.path))}"
                resume_hint = f"go on with: {resume_hint}" if saved else "this method keeps no checkpoints"
                raise Interrupted(f"stopped at step {progress.step}; {resume_hint}", signal_number=signal_number)
            is_best = is_evaluated and config.stop.patience is not None and progress.best["since"] == 0
            if is_best or progress.step % save_every == 0:
                self._save()
        state_bytes = self.context.ranks.all_gather([module.state_bytes()])
        progress.optimizer_bytes = max(progress.optimizer_bytes, *(int(count) for (count,) in state_bytes))
        for record in techniques.close_visit(self._position(visit)):
            self._emit(record)

    def _count(self, visit: Visit, result: StepResult, step_flops: int) -> None:
        """Count a step and log it."""
        progress = self.progress
        progress.step += 1
        progress.skipped += result.skipped
        progress.visit_step += 1
        progress.tokens += self.context.geometry.tokens_per_step
        progress.flops += step_flops - result.flops_saved
        shown = {"loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm, "skipped": result.skipped}
        is_logged = progress.step % self.context.config.log_every == 0 or result.skipped
        self._emit(Step(**self._position(visit).fields(), **shown), is_logged=is_logged)

    def _check_stopping(self, visit: Visit, result: StepResult, is_evaluated: bool, seconds: float) -> None:
        """Decide whether the visit is over, and whether the run is."""
        context, progress = self.context, self.progress
        validation = progress.score["loss"] if is_evaluated else None
        seen = Observation(visit_step=progress.visit_step, loss=result.loss, validation_loss=validation)
        if not result.skipped:
            progress.rule, progress.visit_over = context.rule.update(progress.rule, seen, context.geometry)
        if progress.visit_over is None and progress.visit_step >= visit.duration.in_steps(context.geometry):
            progress.visit_over = f"{visit.duration} done"
        progress.run_over = context.config.stop.reached(
            step=progress.step,
            seconds=seconds,
            validation_loss=validation,
            geometry=context.geometry,
            best=progress.best,
        )

    # -- its parts ------------------------------------------------------------------------------------------------

    def _evaluate(self, block: int | None = None) -> None:
        """Score the model as it is now, and log it. `block` is the index of the active one; None between visits."""
        progress, module = self.progress, self._prepared.module
        module.settle()
        rows = self.context.evaluation_rows
        with self._advise(f"while evaluating {rows} rows at a time (evaluation.batch_rows)"):
            score, samples = evaluate(self.context, module.model, step=progress.step)
        progress.evaluated, progress.score = progress.step, score.to_event()
        if progress.step:
            progress.best = best_evaluation(progress.best, loss=score.loss, step=progress.step)
        place = {"step": progress.step, "tokens": progress.tokens, "visit": progress.visit, "block": block}
        self._emit(Evaluation(**place, seconds=self._seconds(), **progress.score))
        for sample in samples:
            self._emit(sample)

    def _save(self) -> bool:
        """Write a checkpoint; returns False where nothing can be saved. Collective."""
        make_source = self._prepared.module.checkpoint_source
        if make_source is None:
            return False
        source = make_source()
        self._log.sync()
        self.progress.techniques, self.progress.seconds = self._prepared.techniques.state(), self._seconds()
        data, config = self.context.data, self.context.config
        header = CheckpointHeader(
            progress=self.progress,
            log_bytes=self._log.length(),
            data=data.fingerprint,
            config=config.to_mapping(),
            facts=asdict(self.context.facts),
        )
        write_checkpoint(self.context, source, self.folder.checkpoints, header)
        return True

    def _advise(self, doing: str):
        """Inside, an allocation that fails is answered with advice; `doing` is the place, for the message."""
        is_external = self._prepared.module.checkpoint_source is None
        return advise_when_out_of_memory(self.context, self._opening.memory, doing, is_external=is_external)

    def _seconds(self) -> float:
        return round(time.perf_counter() - self._started, 4)

    def _position(self, visit: Visit) -> Position:
        return Position(
            visit=visit.index,
            sweep=visit.sweep,
            block=visit.block.index,
            step=self.progress.step,
            tokens=self.progress.tokens,
            seconds=self._seconds(),
        )

    def _emit(self, record: Record, *, is_logged: bool = True) -> None:
        """Hand a record to the listeners, after it was logged (a resumed run does not log the same record twice)."""
        if is_logged:
            self._log.append(record.to_event())
        for listener in self.listeners:
            listener(record)

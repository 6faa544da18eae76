"""What a person sees while a run trains: one live line on a terminal, a plain line at each evaluation elsewhere."""

from __future__ import annotations

import time
from collections import deque

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from blocktrain.records.run_records import Evaluation, Record, RunEnd, RunHeader, Step
from blocktrain.runtime import peak_memory_bytes
from blocktrain.units import format_bytes, format_count, format_seconds

# Parts of the live line that a narrow terminal has no room for, the first to be left out first.
LEFT_OUT_FIRST = ("visit", "sweep", "memory", "block", "rate", "loss")


def quiet_libraries() -> None:
    """Keep transformers from writing to the terminal: it warns of what small random models lack."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class LiveLine:
    """A listener that shows a run's records; use it as a context manager around the run.

    step 412/900  loss 2.215  block 1  visit 5  sweep 2  11.2k tokens/s  412 MiB  left 1m 12s
    """

    def __init__(self, console: Console, device: torch.device, *, tokenizer: str | None = None):
        """tokenizer: the name of the run's tokenizer, for the first line; None for images."""
        self.console = console
        self.device = device
        self.tokenizer = tokenizer
        self._header: RunHeader | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=50)  # (time, tokens) of the last steps
        self._smoothed: float | None = None
        self._bar_width = 24 if console.width >= 100 else 10
        self._progress = Progress(
            BarColumn(bar_width=self._bar_width),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            refresh_per_second=4,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> LiveLine:
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:  # elsewhere it was not started, and stopping it prints an empty line
            self._progress.stop()

    def __call__(self, record: Record) -> None:
        """Show one record; kinds other than these four are not shown."""
        match record:
            case RunHeader():
                self._start(record)
            case Step():
                self._step(record)
            case Evaluation():
                self._evaluation(record)
            case RunEnd():
                self.console.print(f"  ended: {record.reason}", markup=False, highlight=False)
            case _:
                pass

    def _start(self, header: RunHeader) -> None:
        self._header, self._smoothed = header, None
        self._recent.clear()
        if self._task is not None:  # of another run of a comparison
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task("starting", total=header.steps_planned)
        count = len(header.blocks)
        what = (
            f"{header.model}, {format_count(header.parameters)} parameters in {count} "
            f"{'block' if count == 1 else 'blocks'}, {header.optimizer}, {header.precision}"
            + ("" if self.tokenizer is None else f", tokenizer {self.tokenizer}")
        )
        self.console.print(f"[bold]{escape(header.name)}[/bold]  {escape(what)}", highlight=False)
        for block in header.blocks:
            layers = block.first if block.first == block.last else f"{block.first} .. {block.last}"
            size = f"[dim]{format_count(block.parameters)} parameters[/dim]"
            self.console.print(f"  block {block.index}  {escape(layers)}  {size}", highlight=False)

    def _step(self, step: Step) -> None:
        self._recent.append((time.perf_counter(), step.tokens))
        if not step.skipped:
            before = step.loss if self._smoothed is None else self._smoothed
            self._smoothed = 0.95 * before + 0.05 * step.loss
        if self._task is None or self._header is None:
            return
        header, total = self._header, self._header.steps_planned
        (then, before), (now, after) = self._recent[0], self._recent[-1]
        rate = (after - before) / (now - then) if now > then else 0.0
        parts = {
            "step": f"step {step.step}" + (f"/{total}" if total else ""),
            "loss": f"loss {self._smoothed:.3f}" if self._smoothed is not None else "",
            "block": f"block {step.block}",
            "visit": f"visit {step.visit}",
            "sweep": f"sweep {step.sweep}",
            "rate": f"{format_count(round(rate))} {header.unit}/s",
            "memory": format_bytes(peak_memory_bytes(self.device)),
        }
        if total and rate:
            parts["left"] = f"left {format_seconds((total - step.step) * header.tokens_per_step / rate)}"
        room = self.console.width - self._bar_width - 1
        left_out = iter(LEFT_OUT_FIRST)
        while len(line := "  ".join(part for part in parts.values() if part)) > room:
            if (name := next(left_out, None)) is None:
                break
            parts.pop(name)
        self._progress.update(self._task, completed=step.step, description=line)

    def _evaluation(self, evaluation: Evaluation) -> None:
        parts = [f"step {evaluation.step:>6}"]
        if evaluation.block is not None:
            parts.append(f"block {evaluation.block}")
        if self._smoothed is not None:
            parts.append(f"training loss {self._smoothed:.3f}")
        loss, per_byte = evaluation.loss, evaluation.loss_per_byte
        parts.append(f"validation {loss:.4f}")
        if per_byte is not None and abs(per_byte - loss) >= 0.01 * abs(loss):
            parts[-1] += f" ({per_byte:.4f} per byte)"
        if evaluation.accuracy is not None:
            parts.append(f"accuracy {100 * evaluation.accuracy:.2f} %")
        if evaluation.exact_match is not None:
            parts.append(f"exact match {100 * evaluation.exact_match:.1f} %")
        parts.append(format_seconds(evaluation.seconds))
        self.console.print("  " + "  ".join(parts), markup=False, highlight=False)

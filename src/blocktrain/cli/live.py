"""What a person sees while a run trains: one live line on a terminal, a plain line at each evaluation elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from blocktrain.records.log import Event
from blocktrain.runtime import peak_memory_bytes
from blocktrain.units import format_bytes, format_count, format_seconds


def quiet_libraries() -> None:
    """Leave the terminal to the run: transformers warns of things that random small models do not have."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class LiveLine:
    """Listens to a run's events; use as a context manager around the run.

    step 412/900  loss 2.215  block 1  visit 5  sweep 2  11.2k tokens/s  412 MiB  left 1m 12s
    """

    def __init__(self, console: Console, device: torch.device):
        self.console = console
        self.device = device
        self._opening: Event = {}
        self._recent: deque[tuple[float, int]] = deque(maxlen=50)  # (time, tokens) of the last steps
        self._smoothed: float | None = None
        self._progress = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
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
        self._progress.stop()

    def __call__(self, record) -> None:
        """Show one event."""
        event: Event = record.to_event()
        match event["kind"]:
            case "run":
                self._open(event)
            case "step":
                self._step(event)
            case "evaluation":
                self._evaluation(event)
            case _:
                pass

    def _open(self, event: Event) -> None:
        self._opening, self._smoothed = event, None
        self._recent.clear()
        if self._task is not None:  # of another run of a comparison
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task("starting", total=event["steps_planned"])
        blocks = event["blocks"]
        self.console.print(
            f"[bold]{event['name']}[/bold]  {event['model']}, {format_count(event['parameters'])} parameters in "
            f"{len(blocks)} {'block' if len(blocks) == 1 else 'blocks'}, {event['optimizer']}, {event['precision']}",
            highlight=False,
        )
        for block in blocks:
            span = block["first"] if block["first"] == block["last"] else f"{block['first']} .. {block['last']}"
            count = f"{format_count(block['parameters'])} parameters"
            self.console.print(f"  block {block['index']}  {span}  [dim]{count}[/dim]", highlight=False)

    def _step(self, event: Event) -> None:
        self._recent.append((time.perf_counter(), event["tokens"]))
        if not event["skipped"]:
            before = event["loss"] if self._smoothed is None else self._smoothed
            self._smoothed = 0.95 * before + 0.05 * event["loss"]
        if self._task is not None:
            self._progress.update(self._task, completed=event["step"], description=self._line(event))

    def _line(self, event: Event) -> str:
        total = self._opening["steps_planned"]
        (then, before), (now, after) = self._recent[0], self._recent[-1]
        rate = (after - before) / (now - then) if now > then else 0.0
        parts = [
            f"step {event['step']}" + (f"/{total}" if total else ""),
            f"loss {self._smoothed:.3f}" if self._smoothed is not None else "",
            f"block {event['block']}",
            f"visit {event['visit']}",
            f"sweep {event['sweep']}",
            f"{format_count(round(rate))} {self._opening['unit']}/s",
            format_bytes(peak_memory_bytes(self.device)),
        ]
        if total and rate:
            left = (total - event["step"]) * self._opening["tokens_per_step"] / rate
            parts.append(f"left {format_seconds(left)}")
        return "  ".join(part for part in parts if part)

    def _evaluation(self, event: Event) -> None:
        parts = [f"step {event['step']:>6}"]
        if event["block"] is not None:
            parts.append(f"block {event['block']}")
        if self._smoothed is not None:
            parts.append(f"training loss {self._smoothed:.3f}")
        parts.append(f"validation {_figure(event)}")
        if event.get("accuracy") is not None:
            parts.append(f"accuracy {100 * event['accuracy']:.2f} %")
        if event.get("exact_match") is not None:
            parts.append(f"exact match {100 * event['exact_match']:.1f} %")
        parts.append(format_seconds(event["seconds"]))
        self.console.print("  " + "  ".join(parts), highlight=False)


def _figure(event: dict[str, Any]) -> str:
    """The loss per token or image; per byte beside it where that is another figure."""
    loss, per_byte = event["loss"], event.get("loss_per_byte")
    if per_byte is None or abs(per_byte - loss) < 0.01 * abs(loss):
        return f"{loss:.4f}"
    return f"{loss:.4f} ({per_byte:.4f} per byte)"

"""Techniques are callbacks around a run, its visits, steps and batches, which may change how a step is computed: the
prefix cache, activation checkpointing, a chunked loss, growth, kernels. Neither the trainer nor a train module knows
any.

    around_run                  from before the first step to after the last
      before_visit              a visit begins; its block is not active yet
      open_visit   -> records   its block is active; the first step follows
        around_step             one optimizer step
          around_batch          the forward and backward pass of one micro-batch
      close_visit  -> records   the visit's last step was taken
      state / load_state        what a checkpoint in the middle of a visit has to remember

A new technique is one file: a subclass, and a line of `TECHNIQUES` in `techniques/__init__.py`. One that is not part of
the package calls `register_technique` and is imported by the configuration's key `imports`; it may have a TOML table of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from blocktrain.chain.chain import Layer
from blocktrain.data.sampling import StepRows
from blocktrain.records.run_records import Record
from blocktrain.schedule import Visit

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands inside a visit; the fields that all records of a visit share."""

    visit: int
    sweep: int
    block: int
    step: int
    tokens: int
    seconds: float

    def fields(self) -> dict[str, Any]:
        """As keyword arguments of a record."""
        return asdict(self)


class Technique:
    """Every hook does nothing here; a technique overrides those that it needs. Every rank calls every hook, in the same
    order."""

    def around_run(self) -> AbstractContextManager[object]:
        """Entered before the first step; left with the exception, if one ends the run."""
        return nullcontext()

    def before_visit(self, visit: Visit) -> None:
        """A visit begins (not: is resumed). No block is active, so weights may be copied."""

    def layers_left_out(self, visit: Visit) -> Sequence[Layer]:
        """Layers that the steps of `visit` do not run. What such a step costs is counted for growth alone."""
        return ()

    def open_visit(self, visit: Visit, left_out: Sequence[Layer], position: Position) -> Sequence[Record]:
        """The block is active; a visit begins or is resumed. Returns records for the log."""
        return ()

    def around_step(self, visit: Visit) -> AbstractContextManager[object]:
        """Around an optimizer step of `visit`, and around `open_visit`."""
        return nullcontext()

    def around_batch(self, rows: StepRows, batch: Batch) -> AbstractContextManager[object]:
        """Around the forward and backward pass over `batch`, which holds `rows`.

        A pipeline has no such pass: there neither this nor `prefetch` is called.
        """
        return nullcontext()

    def prefetch(self, rows: StepRows) -> None:
        """`rows` are the next that a micro-batch will need."""

    def flops_saved(self) -> int:
        """FLOPs that this rank has been spared since the last call; negative where it had to spend more."""
        return 0

    def close_visit(self, position: Position) -> Sequence[Record]:
        """The visit's last step was taken. Returns records for the log. A run that is resumed after that step calls
        this without `open_visit`."""
        return ()

    def state(self) -> Any:
        """Plain JSON values for a checkpoint; None for nothing. Collective: rank 0's are saved, for all ranks."""
        return None

    def load_state(self, state: Any) -> None:
        """Go on from what `state` returned."""


@dataclass(frozen=True)
class Techniques:
    """The techniques of a run, by name, applied in order: the first is the outermost."""

    by_name: Mapping[str, Technique] = field(default_factory=dict)

    @contextmanager
    def around_run(self) -> Iterator[None]:
        """Calls it on every technique."""
        with self._all(lambda technique: technique.around_run()):
            yield

    def before_visit(self, visit: Visit) -> None:
        """Calls it on every technique."""
        for technique in self.by_name.values():
            technique.before_visit(visit)

    def layers_left_out(self, visit: Visit) -> tuple[Layer, ...]:
        """Those that any of them leaves out."""
        return tuple(layer for technique in self.by_name.values() for layer in technique.layers_left_out(visit))

    def open_visit(self, visit: Visit, position: Position) -> list[Record]:
        """All records, in order."""
        left_out = self.layers_left_out(visit)
        with self.around_step(visit):
            return [
                record
                for technique in self.by_name.values()
                for record in technique.open_visit(visit, left_out, position)
            ]

    def around_step(self, visit: Visit) -> AbstractContextManager[object]:
        """Calls it on every technique."""
        return self._all(lambda technique: technique.around_step(visit))

    def around_batch(self, rows: StepRows, batch: Batch) -> AbstractContextManager[object]:
        """Calls it on every technique."""
        return self._all(lambda technique: technique.around_batch(rows, batch))

    def prefetch(self, rows: StepRows) -> None:
        """Calls it on every technique."""
        for technique in self.by_name.values():
            technique.prefetch(rows)

    def flops_saved(self) -> int:
        """Their sum since the last call."""
        return sum(technique.flops_saved() for technique in self.by_name.values())

    def close_visit(self, position: Position) -> list[Record]:
        """All records, in order."""
        return [record for technique in self.by_name.values() for record in technique.close_visit(position)]

    def state(self) -> dict[str, Any]:
        """By name, of those that have one. Collective."""
        states = {name: technique.state() for name, technique in self.by_name.items()}
        return {name: state for name, state in states.items() if state is not None}

    def load_state(self, states: Mapping[str, Any]) -> None:
        """What `state` returned; the state of a technique that is not used any more is dropped."""
        for name, technique in self.by_name.items():
            if name in states:
                technique.load_state(states[name])

    @contextmanager
    def _all(self, around: Callable[[Technique], AbstractContextManager[object]]) -> Iterator[None]:
        with ExitStack() as stack:
            for technique in self.by_name.values():
                stack.enter_context(around(technique))
            yield

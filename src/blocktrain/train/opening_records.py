"""A run's first records: what is trained, and what one step of it costs beside a step of full training."""

from __future__ import annotations

from dataclasses import dataclass

from blocktrain.records.codec import Event
from blocktrain.records.run_records import MemoryPeaks, MicroBatch, Record, RunHeader, StepCosts, from_event


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The records `run`, `cost`, `memory` and, where it was decided at the start, `micro_batch`."""

    header: RunHeader
    costs: StepCosts
    memory: MemoryPeaks
    micro_batch: MicroBatch | None = None

    @property
    def records(self) -> list[Record]:
        """Those that there are, in the order of the log."""
        optional = [] if self.micro_batch is None else [self.micro_batch]
        return [self.header, self.costs, self.memory, *optional]

    def to_events(self) -> list[Event]:
        """As plain values, which rank 0 broadcasts."""
        return [record.to_event() for record in self.records]

    @classmethod
    def from_events(cls, events: list[Event]) -> Opening:
        """What `to_events` gave."""
        found = {type(record): record for record in map(from_event, events)}
        return cls(
            header=found[RunHeader],  # pyright: ignore[reportArgumentType]
            costs=found[StepCosts],  # pyright: ignore[reportArgumentType]
            memory=found[MemoryPeaks],  # pyright: ignore[reportArgumentType]
            micro_batch=found.get(MicroBatch),  # pyright: ignore[reportArgumentType]
        )

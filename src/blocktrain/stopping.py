"""When a visit ends by itself and when a run is over. Rules are pure: (state, observation) -> (state, reason).

A rule's state is a plain dictionary of numbers, so that a checkpoint can hold it and a resumed run decides as the
uninterrupted one would have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from blocktrain.errors import ConfigError
from blocktrain.units import BatchGeometry, Duration

RuleState = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a rule may look at after a step."""

    visit_step: int  # steps of this visit so far
    loss: float  # training loss of this step
    validation_loss: float | None = None  # when this step was followed by an evaluation


class VisitRule(Protocol):
    """Local convergence: says after each step whether the visit is over."""

    def start(self) -> RuleState:
        """The state at activation."""
        ...

    def update(self, state: RuleState, seen: Observation, geometry: BatchGeometry) -> tuple[RuleState, str | None]:
        """The next state, and why the visit ends (None: it goes on)."""
        ...


@dataclass(frozen=True, kw_only=True)
class FullLength:
    """Never ends a visit early: it lasts as long as the schedule says."""

    def start(self) -> RuleState:
        """Nothing to remember."""
        return {}

    def update(self, state: RuleState, seen: Observation, geometry: BatchGeometry) -> tuple[RuleState, str | None]:
        """Goes on."""
        return state, None


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Ends a visit when a loss has stopped falling ("training to a local convergence", paper 3.1).

    watch: `"training"`: the exponentially smoothed training loss, corrected for its start as Adam corrects its
        averages (Kingma & Ba 2015, section 3), with time constant `smoothing`. `"validation"`: the validation loss,
        at each evaluation.
    patience: the visit ends once the loss has not fallen below the best so far by the relative `threshold` for this
        long (ReduceLROnPlateau's rule; for validation losses it is the UP criterion of Prechelt, "Early stopping -
        but when?", 1998).
    threshold: relative, see patience.
    smoothing: time constant of the smoothed training loss.
    minimum: no visit is shorter. The maximum is the schedule's visit duration.
    """

    watch: Literal["training", "validation"] = "training"
    patience: Duration = Duration.steps(50)
    threshold: float = 1e-3
    smoothing: Duration = Duration.steps(20)
    minimum: Duration = Duration.steps(1)

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise ConfigError(f"plateau threshold must be in [0, 1), not {self.threshold}")
        if self.watch not in ("training", "validation"):
            raise ConfigError(f"plateau watches 'training' or 'validation', not '{self.watch}'")

    def start(self) -> RuleState:
        """No best loss yet; the average is empty."""
        return {"average": 0.0, "weight": 0.0, "best_step": 0.0}

    def update(self, state: RuleState, seen: Observation, geometry: BatchGeometry) -> tuple[RuleState, str | None]:
        """Smooth, compare with the best so far, and end the visit when the patience has run out."""
        if self.watch == "training":
            decay = 1 - 1 / self.smoothing.in_steps(geometry)
            average = decay * state["average"] + (1 - decay) * seen.loss
            weight = decay * state["weight"] + (1 - decay)
            state = {**state, "average": average, "weight": weight}
            value = average / weight
        elif seen.validation_loss is None:
            return state, None
        else:
            value = seen.validation_loss
        if "best" not in state or value < state["best"] - self.threshold * abs(state["best"]):
            state = {**state, "best": value, "best_step": float(seen.visit_step)}
        waited = seen.visit_step - state["best_step"]
        if waited >= self.patience.in_steps(geometry) and seen.visit_step >= self.minimum.in_steps(geometry):
            return state, f"{self.watch} loss on a plateau at {state['best']:.4g}"
        return state, None


@dataclass(frozen=True, kw_only=True)
class RunLimit:
    """When the whole run stops (paper Algorithm 1, line 10): whichever comes first, the schedule's last sweep included.

    duration: steps, tokens or epochs in all.
    target_loss: a validation loss that is reached.
    hours: wall-clock, over all sessions of a resumed run.
    """

    duration: Duration | None = None
    target_loss: float | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        if self.hours is not None and not self.hours > 0:
            raise ConfigError(f"hours must be positive, not {self.hours:g}")

    def reached(
        self, *, step: int, seconds: float, validation_loss: float | None, geometry: BatchGeometry
    ) -> str | None:
        """Why the run is over, or None."""
        if self.duration is not None and step >= self.duration.in_steps(geometry):
            return f"{self.duration} done"
        if self.target_loss is not None and validation_loss is not None and validation_loss <= self.target_loss:
            return f"validation loss {validation_loss:.4g} reached the target {self.target_loss:g}"
        if self.hours is not None and seconds >= 3600 * self.hours:
            return f"{self.hours:g} hours are over"
        return None

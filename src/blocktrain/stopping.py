"""When a visit ends early, and when a run is over. Rules are pure: (state, observation) -> (state, reason).

The state of a rule is a plain dictionary of numbers. A checkpoint can store it, so a resumed run decides as the
uninterrupted run would have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from blocktrain.errors import ConfigError
from blocktrain.units import BatchGeometry, Duration

RuleState = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a rule sees after a step."""

    visit_step: int  # steps of this visit so far, this one included
    loss: float  # training loss of this step
    validation_loss: float | None = None  # if an evaluation followed this step


class VisitRule(Protocol):
    """Decides after each step whether the visit is over (local convergence, paper 3.1)."""

    def start(self) -> RuleState:
        """The state at the beginning of a visit."""
        ...

    def update(self, state: RuleState, seen: Observation, geometry: BatchGeometry) -> tuple[RuleState, str | None]:
        """The next state, and the reason why the visit ends, or None if it continues."""
        ...


@dataclass(frozen=True, kw_only=True)
class FullLength:
    """Never ends a visit early: it lasts as long as the schedule says."""

    def start(self) -> RuleState:
        """An empty state."""
        return {}

    def update(self, state: RuleState, seen: Observation, geometry: BatchGeometry) -> tuple[RuleState, str | None]:
        """The visit continues."""
        return state, None


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Ends a visit when a loss has stopped falling ("training to a local convergence", paper 3.1).

    watch: "training" is the exponentially smoothed training loss, with bias correction as in Adam (Kingma & Ba 2015,
        section 3); "validation" is the validation loss at each evaluation.
    patience: the visit ends once the loss has not fallen below the best one by `threshold` for this long
        (ReduceLROnPlateau's rule; for validation losses it is the UP criterion of Prechelt, "Early stopping - but
        when?", 1998).
    threshold: the improvement that counts, relative to the best loss.
    smoothing: the time constant of the smoothed training loss.
    minimum: no visit is shorter than this. The longest is the schedule's visit duration.
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
        """No best loss yet, and an empty average."""
        return {"average": 0.0, "weight": 0.0, "best_step": 0.0}

    def update(self, state: RuleState, seen: Observation, geometry: BatchGeometry) -> tuple[RuleState, str | None]:
        """Smooths the loss, compares it with the best so far, and ends the visit when the patience has run out."""
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


def best_evaluation(best: RuleState, *, loss: float, step: int) -> RuleState:
    """The lowest validation loss of a run (`loss`), its `step`, and how many evaluations there were `since`, after one
    more evaluation. `best` is what it was before; empty at first. A loss that is not finite is never the best."""
    if math.isfinite(loss) and loss < best.get("loss", math.inf):
        return {"loss": loss, "step": step, "since": 0}
    return {**best, "since": best.get("since", 0) + 1}


@dataclass(frozen=True, kw_only=True)
class RunLimit:
    """When the run stops (paper Algorithm 1, line 10): at the first of these limits, or at the end of the schedule.

    duration: the total number of steps, tokens or epochs.
    target_loss: the validation loss to reach.
    hours: wall-clock hours, summed over all sessions of a resumed run.
    patience: the number of evaluations in a row without a validation loss below the lowest one so far (early stopping).
        Each evaluation that is the best so far is then followed by a checkpoint, which `export --checkpoint best`
        takes. The evaluation before the first step does not count.
    """

    duration: Duration | None = None
    target_loss: float | None = None
    hours: float | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.patience is not None and self.patience < 1:
            raise ConfigError(f"patience must be at least 1 evaluation, not {self.patience}")
        if self.target_loss is not None and not math.isfinite(self.target_loss):
            raise ConfigError(f"target_loss must be a finite number, not {self.target_loss}")
        if self.hours is not None and not self.hours > 0:
            raise ConfigError(f"hours must be positive, not {self.hours:g}")

    def reached(
        self,
        *,
        step: int,
        seconds: float,
        validation_loss: float | None,
        geometry: BatchGeometry,
        best: RuleState,
    ) -> str | None:
        """The reason why the run is over, or None. best: what `best_evaluation` gave after the last evaluation."""
        if self.duration is not None and step >= self.duration.in_steps(geometry):
            return f"{self.duration} done"
        if self.target_loss is not None and validation_loss is not None and validation_loss <= self.target_loss:
            return f"validation loss {validation_loss:.4g} reached the target {self.target_loss:g}"
        if self.hours is not None and seconds >= 3600 * self.hours:
            return f"{self.hours:g} hours are over"
        if self.patience is not None and best.get("since", 0) >= self.patience:
            lowest = f"{best['loss']:.4g} at step {best['step']:.0f}" if "loss" in best else "never finite"
            return f"validation loss has not improved for {self.patience} evaluations (lowest: {lowest})"
        return None

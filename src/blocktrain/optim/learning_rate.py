"""The learning rate as a function of the step in the run and in the visit: a factor on the optimizer's own rate.

factor(step) = warmup(step) * shape(progress) * visit_warmup(step in visit)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from blocktrain.errors import ConfigError, nearest

Shape = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """A shape over the run, with linear warm-ups over the first steps of the run and of each visit.

    shape: `constant`; `linear` and `cosine` fall from 1 to `final` over the run (cosine: Loshchilov & Hutter 2017,
        eq. 5); `wsd` stays at 1 and falls linearly over the last `decay_share` (Hu et al. 2024, MiniCPM).
    final: factor at the end of the run.
    decay_share: the share of the run over which `wsd` falls.
    warmup_steps, visit_warmup_steps: the factor rises from 1/n to 1 over n steps.
    """

    shape: Shape = "constant"
    final: float = 0.1
    warmup_steps: int = 0
    visit_warmup_steps: int = 0
    decay_share: float = 0.2

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            raise ConfigError(f"learning-rate shape '{self.shape}' is unknown; {nearest(self.shape, get_args(Shape))}")
        for name in ("final", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"learning-rate {name} must be in [0, 1], not {getattr(self, name)}")
        for name in ("warmup_steps", "visit_warmup_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"learning-rate {name} must not be negative, not {getattr(self, name)}")

    def factor(self, step: int, *, total: int | None, visit_step: int) -> float:
        """The factor for `step` of `total`, which is the `visit_step`-th of its visit (both from 0).

        >>> LearningRate(shape="cosine", final=0.0).factor(50, total=100, visit_step=0)
        0.5
        """
        factor = _ramp(step, self.warmup_steps) * _ramp(visit_step, self.visit_warmup_steps)
        if self.shape == "constant":
            return factor
        if total is None:
            raise ConfigError(
                f"learning-rate shape '{self.shape}' needs a run of known length; set stop.duration or sweeps"
            )
        progress = min(1.0, step / total)
        if self.shape == "cosine":
            height = 0.5 * (1 + math.cos(math.pi * progress))
        elif self.shape == "linear":
            height = 1 - progress
        else:
            height = min(1.0, (1 - progress) / self.decay_share) if self.decay_share else 1.0
        return factor * (self.final + (1 - self.final) * height)


def _ramp(step: int, length: int) -> float:
    return min(1.0, (step + 1) / length) if length else 1.0

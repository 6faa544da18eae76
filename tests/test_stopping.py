"""When a visit ends by itself and when a run is over, computed by hand."""

from __future__ import annotations

import json
import math

import pytest

from blocktrain.errors import ConfigError
from blocktrain.stopping import FullLength, Observation, Plateau, RuleState, RunLimit, VisitRule, best_evaluation
from blocktrain.units import BatchGeometry, Duration

PACE = BatchGeometry(tokens_per_step=10, rows_per_step=2, rows_per_epoch=20)


def ends_at(rule: VisitRule, observations: list[Observation]) -> tuple[int, str] | None:
    """The step and the reason; the state goes through JSON after each step, as through a checkpoint."""
    state = rule.start()
    for seen in observations:
        state, reason = rule.update(json.loads(json.dumps(state)), seen, PACE)
        if reason is not None:
            return seen.visit_step, reason
    return None


def training(*losses: float) -> list[Observation]:
    return [Observation(visit_step=step, loss=loss) for step, loss in enumerate(losses, start=1)]


def validation(*losses: float | None) -> list[Observation]:
    return [
        Observation(visit_step=step, loss=9.0 - step, validation_loss=loss) for step, loss in enumerate(losses, start=1)
    ]


def test_full_length_never_ends_a_visit():
    assert ends_at(FullLength(), training(*[1.0] * 1000)) is None


def test_plateau_of_the_smoothed_training_loss_by_hand():
    """Time constant 2: the average halves its distance. Losses 4, 2, 2, 2, 2 give, corrected for the start,
    4, 8/3, 16/7, 32/15, 64/31 = 4, 2.667, 2.286, 2.133, 2.065. With threshold 0.1 the best is last beaten at step 3
    (2.286 < 0.9 * 2.667); 2.133 and 2.065 are not below 0.9 * 2.286 = 2.057, and after two such steps it is over."""
    rule = Plateau(patience=Duration.steps(2), threshold=0.1, smoothing=Duration.steps(2))
    assert ends_at(rule, training(4, 2, 2, 2, 2)) == (5, "training loss on a plateau at 2.286")
    state = rule.start()
    for seen in training(4, 2, 2):
        state, _ = rule.update(state, seen, PACE)
    assert state == {"average": 2.0, "weight": 0.875, "best": 16 / 7, "best_step": 3.0}


def test_without_smoothing_the_loss_itself_is_compared():
    rule = Plateau(patience=Duration.steps(3), threshold=0.0, smoothing=Duration.steps(1))
    assert ends_at(rule, training(5, 4, 4.5, 3, 3, 3.5, 3, 2)) == (7, "training loss on a plateau at 3")


def test_a_loss_that_goes_on_falling_never_ends_a_visit():
    rule = Plateau(patience=Duration.steps(5), threshold=1e-3)
    assert ends_at(rule, training(*(0.99**step for step in range(500)))) is None


def test_a_negative_loss_must_fall_too():
    rule = Plateau(patience=Duration.steps(1), threshold=0.1, smoothing=Duration.steps(1))
    assert ends_at(rule, training(-1.0, -1.2, -1.4)) is None
    assert ends_at(rule, training(-1.0, -1.05)) is not None


def test_validation_is_looked_at_only_where_there_was_an_evaluation():
    rule = Plateau(watch="validation", patience=Duration.steps(4), threshold=0.01)
    seen = validation(None, 3.0, None, 2.0, None, 1.995, None, 1.999, None, 1.0)
    assert ends_at(rule, seen) == (8, "validation loss on a plateau at 2")


def test_a_loss_that_is_not_a_number_never_counts_as_better():
    rule = Plateau(patience=Duration.steps(3), smoothing=Duration.steps(1))
    nan = float("nan")
    assert ends_at(rule, training(2.0, nan, nan, nan)) == (4, "training loss on a plateau at 2")


def test_no_visit_is_shorter_than_the_minimum():
    rule = Plateau(patience=Duration.steps(2), smoothing=Duration.steps(1), minimum=Duration.steps(50))
    found = ends_at(rule, training(*[1.0] * 100))
    assert found is not None
    assert found[0] == 50


def test_patience_and_minimum_in_tokens_and_epochs():
    rule = Plateau(patience=Duration.tokens(40), smoothing=Duration.steps(1))  # 4 steps
    assert ends_at(rule, training(*[1.0] * 20)) == (5, "training loss on a plateau at 1")
    rule = Plateau(patience=Duration.steps(1), smoothing=Duration.steps(1), minimum=Duration.epochs(1))  # 10 steps
    assert ends_at(rule, training(*[1.0] * 20)) == (10, "training loss on a plateau at 1")


def test_a_rule_leaves_the_state_it_was_given_alone():
    rule, state = Plateau(), Plateau().start()
    before: RuleState = dict(state)
    rule.update(state, Observation(visit_step=1, loss=1.0), PACE)
    assert state == before


@pytest.mark.parametrize("threshold", [-0.1, 1.0, float("nan")])
def test_a_threshold_out_of_range(threshold: float):
    with pytest.raises(ConfigError, match=r"plateau threshold must be in \[0, 1\), not"):
        Plateau(threshold=threshold)


def test_an_unknown_loss_to_watch():
    with pytest.raises(ConfigError, match="plateau watches 'training' or 'validation', not 'test'"):
        Plateau(watch="test")  # pyright: ignore[reportArgumentType]


def reached(
    limit: RunLimit, *, step: int = 0, seconds: float = 0.0, loss: float | None = None, best: RuleState | None = None
) -> str | None:
    return limit.reached(step=step, seconds=seconds, validation_loss=loss, geometry=PACE, best=best or {})


def test_a_run_ends_by_its_duration():
    assert reached(RunLimit(duration=Duration.tokens(1000)), step=99) is None
    assert reached(RunLimit(duration=Duration.tokens(1000)), step=100) == "1000 tokens done"


def test_a_run_ends_at_its_target_loss():
    limit = RunLimit(target_loss=1.5)
    assert reached(limit, loss=None) is None
    assert reached(limit, loss=1.501) is None
    assert reached(limit, loss=float("nan")) is None
    assert reached(limit, loss=1.4996) == "validation loss 1.5 reached the target 1.5"


def test_a_run_ends_by_the_clock():
    assert reached(RunLimit(hours=0.5), seconds=1799) is None
    assert reached(RunLimit(hours=0.5), seconds=1800) == "0.5 hours are over"


def test_whichever_comes_first():
    limit = RunLimit(duration=Duration.steps(100), target_loss=1.5, hours=1)
    assert reached(limit, step=99, seconds=3599, loss=1.6) is None
    assert reached(limit, step=100) == "100 steps done"
    assert reached(limit, loss=1.0) is not None
    assert reached(limit, seconds=3600) == "1 hours are over"


def test_without_a_limit_a_run_goes_on():
    assert reached(RunLimit(), step=10**9, seconds=1e9, loss=0.0) is None


@pytest.mark.parametrize(
    ("losses", "end"),
    [
        ([3.0, 2.0, 1.0, 0.5], None),
        ([3.0, 2.0, 2.5, 1.9, 2.0], None),
        ([3.0, 2.0, 2.0, float("nan")], "has not improved for 2 evaluations (lowest: 2 at step 20)"),
        ([float("nan"), float("inf")], "has not improved for 2 evaluations (lowest: never finite)"),
    ],
)
def test_a_run_ends_when_its_patience_does(losses: list[float], end: str | None):
    best: RuleState = {}
    found = None
    for index, loss in enumerate(losses):
        assert found is None
        best = best_evaluation(best, loss=loss, step=10 * (index + 1))
        found = reached(RunLimit(patience=2), best=best)
    assert found == (None if end is None else f"validation loss {end}")


def test_patience_must_be_positive():
    with pytest.raises(ConfigError, match="target_loss must be a finite number, not -inf"):
        RunLimit(target_loss=-math.inf)  # the run would never end
    with pytest.raises(ConfigError, match="patience must be at least 1 evaluation, not 0"):
        RunLimit(patience=0)


def test_hours_must_be_positive():
    with pytest.raises(ConfigError, match=r"hours must be positive, not 0"):
        RunLimit(hours=0)

"""The rows of a comparison: what is compared at equal time, and which steps a step's time is of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blocktrain.report.comparison_table import comparison_rows


def run(method: str, *, evaluations: list[tuple[int, float, float]], steps: list[float], **more: Any) -> Any:
    """evaluations: step, seconds, loss. steps: the seconds at which each was done, from step 1."""
    seen = [
        SimpleNamespace(step=step, tokens=10 * step, seconds=seconds, loss=loss, loss_per_byte=None)
        for step, seconds, loss in evaluations
    ]
    return SimpleNamespace(
        header=SimpleNamespace(method=method, optimizer="AdamW", unit="tokens"),
        is_full=method == "full",
        evaluations=seen,
        visits=[SimpleNamespace(step=step) for step in more.get("visits", ())],
        steps=[SimpleNamespace(step=at, seconds=seconds) for at, seconds in enumerate(steps, 1)],
        seconds=seen[-1].seconds,
        steps_done=len(steps),
        flops_until=lambda step: 100 * step,
        memory_peaks=None,
        end=None,
    )


def test_losses_at_equal_time_are_those_when_the_fastest_run_was_over() -> None:
    """Seconds count from the first evaluation, because what comes before it is preparation."""
    full = run("full", evaluations=[(0, 100, 4.0), (4, 120, 2.0)], steps=[105, 110, 115, 120])
    bcd = run("bcd", evaluations=[(0, 5, 4.0), (2, 15, 3.0), (4, 35, 1.0)], steps=[10, 15, 25, 35])
    first, second = comparison_rows([full, bcd], ["full", "bcd"])
    assert (first.seconds, second.seconds) == (20, 30)
    assert (first.loss_at_equal_time, second.loss_at_equal_time) == (2.0, pytest.approx(2.0))
    assert (first.loss, second.loss) == (2.0, 1.0)
    assert second.multiplier == pytest.approx(0.75)


def test_a_steps_time_is_of_steps_that_nothing_interrupts() -> None:
    """An evaluation after step 2, and a switch of blocks after step 4, take much longer than a step."""
    full = run("full", evaluations=[(0, 0, 4.0), (7, 7, 2.0)], steps=[1, 2, 3, 4, 5, 6, 7])
    seconds = [1.0, 1.5, 51.5, 52.0, 152.0, 152.5, 352.5]
    bcd = run("bcd", evaluations=[(0, 0, 4.0), (2, 50, 3.0), (6, 350, 2.5)], steps=seconds, visits=[0, 4])
    first, second = comparison_rows([full, bcd], ["full", "bcd"])
    assert (first.step_seconds, second.step_seconds, second.step_ratio) == (1, 0.5, 0.5)

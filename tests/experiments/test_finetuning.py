"""Time to a loss, from steps timed in turns: what fills a cache costs what it would without one."""

from __future__ import annotations

import pytest
from finetuning.cases import table, time_to
from training import loss_after

COST = {"full": 1.0, "block 1": 0.6, "block 2": 0.4, "block 2, cached": 0.2}
VISITS = [[2, 0, 5], [1, 20, 10]]  # 20 steps of which 5 fill, then 10 of another block


@pytest.mark.parametrize(("steps", "cost"), [(3, 1.2), (5, 2.0), (15, 4.0), (20, 5.0), (25, 8.0)])
def test_steps_are_counted_at_their_price(steps: int, cost: float) -> None:
    run = {"steps": 30, "tokens": 480, "visits": VISITS}
    assert time_to("blocks", run, 16 * steps, COST) == pytest.approx(cost)


def test_a_method_without_visits_has_one_price() -> None:
    assert time_to("full", {"steps": 30, "tokens": 480, "visits": []}, 160, COST) == pytest.approx(10)


def test_the_table_compares_seed_by_seed() -> None:
    def run(*losses: float, visits: list[list[int]], share: float) -> dict[str, object]:
        curve = [[80 * at, loss, 0.5] for at, loss in enumerate(losses)]
        kept = {"memory_bytes": 100 * share, "peak_bytes": 200 * share}
        return {"steps": 10, "tokens": 160, "accuracy": 0.5, "visits": visits, "curve": curve, **kept}

    full = [run(4.0, 3.0, last, visits=[], share=1.0) for last in (2.0, 2.5)]
    mine = [run(4.0, 2.0, 1.0, visits=[[2, 0, 10]], share=0.4) for _ in full]
    results = {
        f"{name} [s]": {"scale": "s", "figures": {"search": [[0.1, 1.0], [0.2, None]], "lr": 0.1, "runs": runs}}
        for name, runs in {"full": full, "blocks, top half": mine}.items()
    }
    steps = {name: {"ratio": ratio} for name, ratio in COST.items()}
    results["step time [s]"] = {"scale": "s", "figures": {"steps": steps}}
    shown = table(results)
    assert "| 0.44 (0.38 to 0.50) | 0.17 (0.15 to 0.20) | 0.400 | 0.400 | 0.1: 1.000, 0.2: diverged |" in shown


def test_a_curve_is_read_between_its_evaluations() -> None:
    assert loss_after([[0, 4.0, None], [100, 3.0, None]], 25) == pytest.approx(3.75)

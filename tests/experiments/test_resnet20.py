"""Equal time, from steps timed in turns; and accuracy compared seed by seed."""

from __future__ import annotations

import pytest
from resnet20.cases import price, table

COST = {"full": 1.0, "blocks, 0": 0.8, "blocks, 1": 0.4}
VISITS = [[0, 0, 10], [1, 10, 10], [0, 20, 5]]  # the last visit was cut short


def test_a_run_costs_the_sum_of_its_steps() -> None:
    assert price("blocks", {"steps": 25, "visits": VISITS}, COST) == pytest.approx(15 * 0.8 + 10 * 0.4)
    assert price("full", {"steps": 25, "visits": [[0, 0, 25]]}, COST) == pytest.approx(25)


def test_the_table_compares_seed_by_seed() -> None:
    def run(accuracy: float, *, steps: int, visits: list[list[int]], share: float) -> dict[str, object]:
        kept = {"memory_bytes": 100 * share, "visits": visits}
        return {"steps": steps, "accuracy": accuracy, "curve": [[0, 2.3, 0.1], [99, 1.5, accuracy]], **kept}

    runs = {
        "full": [run(accuracy, steps=16, visits=[[0, 0, 16]], share=1.0) for accuracy in (0.5, 0.52)],
        "blocks": [run(accuracy, steps=25, visits=VISITS, share=0.6) for accuracy in (0.49, 0.53)],
    }
    results = {
        f"{name} [s]": {"scale": "s", "figures": {"search": [[0.1, 1.0], [0.2, None]], "lr": 0.1, "runs": each}}
        for name, each in runs.items()
    }
    results["step time [s]"] = {
        "scale": "s",
        "figures": {"steps": {name: {"ratio": cost} for name, cost in COST.items()}},
    }
    shown = table(results)
    assert (
        "| ours, full | 0.1 | 2 | 16 steps | 1.000 | 51.0 (50.0 to 52.0) | – | 1.500 (1.500 to 1.500) | 1.000 |"
        in shown
    )
    assert "| 25 steps | 1.000 | 51.0 (49.0 to 53.0) | 0.0 (-1.0 to 1.0) | 1.500 (1.500 to 1.500) | 0.600 |" in shown
    assert "| paper, BCD | 0.1 | – | 322 epochs | – | 88.7 | 0.0 | 0.0263 |" in shown

"""Dollars to a loss: the README says what the script makes of the result files, and a loss of money is shown."""

import json
from pathlib import Path
from typing import Any

import pytest
from economics import to_loss
from tabling import placed

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "economics"
STORED = json.loads((FOLDER / "to_loss.json").read_text())


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return to_loss.rows([each() for each in to_loss.MEASURED], to_loss.load_hardware())


def test_the_readme_and_the_result_are_the_scripts(found: list[dict[str, Any]]) -> None:
    text = to_loss.tables(found, [each() for each in to_loss.MEASURED])
    assert placed("to_loss.py", text) in (FOLDER / "README.md").read_text()
    assert STORED["rows"] == json.loads(json.dumps(found))


def test_the_batches_of_the_readme_are_those_of_the_result() -> None:
    """Recomputed for one model; all of them take 8 seconds."""
    measured, hardware = [each() for each in to_loss.MEASURED], to_loss.load_hardware()
    text = to_loss.batch_tables(STORED["batches"], measured)
    assert placed("to_loss.py, batches", text) in (FOLDER / "README.md").read_text()
    again = to_loss.batches(measured, hardware, models=("g-1.6b",))
    assert json.loads(json.dumps(again)) == [row for row in STORED["batches"] if row["model"] == "G-1.6B"]
    for row in STORED["rows"]:  # nobody pays more where the number of cards may be chosen
        (free,) = [each for each in STORED["batches"] if each["batch"] == to_loss.ROWS and same(each, row)]
        assert free["full"]["dollars"] <= row["full"]["dollars"]
        assert free["blocks"]["dollars_same_tokens"] <= row["blocks"]["dollars_same_tokens"]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("measured", "model", "card"))


def test_what_is_saved_changes_its_sign_at_the_break_even(found: list[dict[str, Any]]) -> None:
    for row in found:
        mean, least, most = row["saved"]
        assert (mean > 0) == (row["multiplier"] < row["break_even"]), row
        assert least <= mean <= most, row
        assert row["dollars"] == pytest.approx(row["blocks"]["dollars_same_tokens"] * row["multiplier"])


def test_a_loss_that_was_not_reached_is_not_called_full_trainings() -> None:
    item = to_loss.Measured(name="here", source="a.json", blocks=3, values=[2.0, 3.0], reached=False)
    row = {
        "measured": "here",
        "model": "G",
        "card": "c",
        "full": {"cards": 2, "step_seconds": 1.0, "dollars": 10.0},
        "blocks": {"cards": 1, "step_seconds": 1.5, "dollars_same_tokens": 6.0},
        "dollars": 15.0,
        "saved": [-0.5, -0.8, -0.2],
        "break_even": 10 / 6,
        "cheapest_full": 7.5,
    }
    shown = to_loss.tables([row], [item])
    assert shown.startswith("### here: 2.50 (2.00 to 3.00), to the last loss in blocks, not full training's (a.json)")
    assert "| G | c | 2, 1.00, 10.00 | 1, 1.50, 15.00 | -50 (-80 to -20) | 1.67 | -100 |" in shown

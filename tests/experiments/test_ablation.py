"""The ablation's table: what the log says is what the script makes of its result file."""

import json
from pathlib import Path
from typing import Any

import pytest
from ablations import ablation
from tabling import placed

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "ablations"


@pytest.mark.parametrize("name", ablation.SIZES)
def test_the_log_shows_the_result(name: str) -> None:
    size = ablation.SIZES[name]
    table = ablation.table(json.loads((FOLDER / size.result).read_text()))
    assert placed(size.writer, table) in ablation.LOG.read_text()


def test_seeds_are_averaged_and_what_was_not_reached_says_so() -> None:
    def seed(loss: float, multiplier: float | None) -> dict[str, Any]:
        costs = {"multiplier": multiplier, "flops": multiplier, "flops_cached": multiplier, "time": multiplier}
        peaks = {"peak_bytes": [60, 30], "peak_bytes_full": 100, "kept_bytes": [20, 10], "kept_bytes_full": 50}
        return {"method": "blocks, M=3", "rate": 2e-3, "loss": loss, "tokens_of_plain": 1.0, **costs, **peaks}

    search = {"blocks, M=3": {"0.002": 2.0, "0.004": 2.3}}
    reached = ablation.table({"search": search, "rows": [seed(2.0, 1.5), seed(2.2, 1.7)]})
    assert "| blocks, M=3 | 0.002 of 2 | 2 | 2.100 (2.000 to 2.200) | – | 1.60 (1.50 to 1.70) |" in reached
    assert reached.endswith("| 0.40 | 0.60 | 0.45 |\n")
    assert "| not reached | not reached | not reached | not reached |" in ablation.table(
        {"search": search, "rows": [seed(2.0, 1.5), seed(2.2, None)]}
    )


def test_runs_that_lack_a_method_do_not_take_its_result_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--write` with a new folder of runs once emptied result.json and the log's table."""
    known = (FOLDER / "result.json").read_text()
    (tmp_path / "result.json").write_text(known)
    monkeypatch.setattr(ablation, "HERE", tmp_path)
    with pytest.raises(SystemExit, match="not written: no finished runs of blocks, M=3, full"):
        ablation.write(ablation.collected(tmp_path / "runs", ablation.SIZES["0.7M"], 1), ablation.SIZES["0.7M"])
    assert (tmp_path / "result.json").read_text() == known

"""The ablation's table: what the log says is what the script makes of its result file."""

import json
from pathlib import Path
from typing import Any

import pytest
from ablations import ablation
from ablations.cases import GROWN
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


@pytest.mark.slow
def test_a_growing_run_is_timed_by_the_layers_that_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its three visits of one step each leave out four layers, two and none; the run stops at the second visit to
    block 0, which leaves out none."""
    blocks = 'blocks.patterns=[["embedding", "*.h.[01]"], ["*.h.[23]"], ["*.h.[45]", "head"]]'
    schedule = ["schedule.visit=1 steps", "stop.duration=4 steps"]
    monkeypatch.setitem(ablation.METHODS, "grown", [*GROWN, blocks, *schedule])
    tiny = ("model.config.n_embd=8", "model.config.n_head=2", "batch.rows=2", "evaluation.rows=4")
    text = (f"text.source={Path(__file__).parent}", "text.row_tokens=16", "evaluation.every=1 steps")
    size = ablation.Size(result="tiny.json", steps=4, rates=(1e-3,), overrides=(*tiny, *text))
    for method in ("full", "grown"):
        ablation.train(tmp_path, size, method, 1e-3, 0)
    timing = ablation.time_steps(tmp_path, size, ["grown"], 1)
    names = ["block 0 with 4 layers left out", "block 1 with 2 layers left out", "block 2", "block 0"]
    for share, name in zip((0.3, 0.4, 0.5, 0.8), names, strict=True):
        timing["steps"][f"grown: {name}"]["ratio"] = share
    (tmp_path / "steps.json").write_text(json.dumps(timing))
    monkeypatch.setattr(ablation, "tokens_to_reach", lambda _loss, curve: curve[-1][0])
    found = ablation.row(tmp_path, "grown", 1e-3, 0, 1e-3)
    assert found is not None
    assert found["time"] == pytest.approx((0.3 + 0.4 + 0.5 + 0.8) / 4)
    assert found["flops"] == pytest.approx(found["flops_in_all"])


def test_runs_that_lack_a_method_do_not_take_its_result_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--write` with a new folder of runs once emptied result.json and the log's table."""
    known = (FOLDER / "result.json").read_text()
    (tmp_path / "result.json").write_text(known)
    monkeypatch.setattr(ablation, "HERE", tmp_path)
    with pytest.raises(SystemExit, match="not written: no finished runs of blocks, M=3, full"):
        ablation.write(ablation.collected(tmp_path / "runs", ablation.SIZES["0.7M"], 1), ablation.SIZES["0.7M"])
    assert (tmp_path / "result.json").read_text() == known

"""`blocktrain plan` as a person meets it: fast, without PyTorch, with one message for bad input."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from blocktrain.cli.main import main
from blocktrain.plan.cost import MULTIPLIERS
from blocktrain.plan.hardware import load_hardware
from blocktrain.plan.presets import find_model
from blocktrain.records.log import EventLog
from blocktrain.train.config import MemoryConfig, RunConfig
from blocktrain.train.toml_dataclasses import read_toml

GOOD = {"--model": "llama-2-7b", "--tokens": "1B", "--seq": "1024", "--gpu": "rtx4090"}
TINY = {
    "model_type": "gpt2", "n_layer": 4, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 257,
}  # fmt: skip


def arguments(**changes: str) -> list[str]:
    given = GOOD | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return ["plan", *(text for pair in given.items() for text in pair)]


def planned(capsys: pytest.CaptureFixture[str], **changes: str) -> dict[str, Any]:
    assert main([*arguments(**changes), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _cpu_seconds_of_children() -> float:
    """Unlike wall time, this does not depend on what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_it_answers_in_a_second_without_torch() -> None:
    code = (
        "import sys; from blocktrain.cli.main import main; "
        f"code = main({arguments(gpus='8', html='/dev/null')!r}); sys.exit(3 if 'torch' in sys.modules else code)"
    )
    seconds = []
    for _ in range(3):
        start = _cpu_seconds_of_children()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        seconds.append(_cpu_seconds_of_children() - start)
        assert done.returncode == 0, done.stderr
        assert "Layouts that fit" in done.stdout
    assert min(seconds) < 1.0


def test_layouts_are_ranked_by_cost_and_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, gpus="4", method="all")
    costs = [float(item["usd"]) for item in found["layouts"]]
    assert costs == sorted(costs)
    assert len(costs) > 3
    for item in found["layouts"]:
        assert item["peak_bytes"] < 24 * 2**30
        assert item["peak_bytes"] == pytest.approx(sum(item["memory_bytes"].values()))
        assert item["step_seconds"] == pytest.approx(sum(item["step_parts_seconds"].values()))
        assert item["data"] * item["pipeline"] == 4
    labels = {item["label"] for item in found["alternatives"]}
    assert {"full-parameter", "full, sharded (FSDP)", "full, host optimizer"} <= labels
    assert {item["card"] for item in found["alternatives"]} >= {"rtx4090", "a100-80", "a800"}


def test_one_card_streams_a_model_of_seventy_billion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """140 GB of host memory hold its bf16 weights and nothing else: no moments between visits, no low bits."""
    out = tmp_path / "run.toml"
    asked = {"model": "llama-3-70b", "seq": "2048", "host_memory": "135"}
    assert main([*arguments(**asked), "--json", "--out", str(out)]) == 0
    (best, *_) = json.loads(capsys.readouterr().out)["layouts"]
    assert best["frozen"] == "host"
    assert (best["precision"], best["state"]) == ("bf16", "drop")
    assert best["host_bytes"] == {"frozen": 2 * find_model("llama-3-70b").parameters}
    assert best["peak_bytes"] < 24 * 2**30
    loaded = RunConfig.load(out)
    assert loaded.precision == "bf16"
    assert loaded.memory == MemoryConfig(frozen="host", checkpointing="layers", loss_chunk=1024)
    assert loaded.blocks.largest == best["largest"]
    slow = planned(capsys, **(asked | {"seq": "512", "rows": "1"}))["layouts"][0]
    assert slow["limit"] == "host link"
    assert slow["step_parts_seconds"]["streaming"] > slow["step_parts_seconds"]["forward"]


def test_more_host_memory_buys_exactness(capsys: pytest.CaptureFixture[str]) -> None:
    (best, *_) = planned(capsys, model="llama-3-70b", host_memory="1000", disk="3000")["layouts"]
    assert (best["precision"], best["state"]) == ("bf16-exact", "host")
    assert set(best["host_bytes"]) == {"frozen", "low bits", "moments"}


@pytest.mark.parametrize(
    "asked",
    [
        {"precision": "nf4", "moments": "8bit", "largest": "60000", "frozen": "host", "loss_chunk": "8"},
        {"precision": "int8", "state": "drop", "checkpointing": "layers", "blocks": "2"},
        {"precision": "bf16", "loss_chunk": "off", "checkpointing": "none", "blocks": "3", "pieces": "modules"},
    ],
)
def test_the_written_configuration_holds_what_was_asked_for(
    asked: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.toml"
    assert main([*arguments(model="gpt2", rows="4", **asked), "--out", str(out), "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layouts"][0]
    loaded = RunConfig.from_mapping(read_toml(out))
    assert loaded.precision == asked["precision"] == layout["precision"]
    assert loaded.optimizer.moments == asked.get("moments", "fp32") == layout["moments"]
    assert loaded.optimizer.state == asked.get("state", "host") == layout["state"]
    assert loaded.memory.frozen == asked.get("frozen", "device") == layout["frozen"]
    assert loaded.memory.loss_chunk == layout["loss_chunk"]
    assert loaded.memory.checkpointing == layout["checkpointing"].replace("none", "off")
    assert loaded.blocks.largest == layout["largest"]
    assert loaded.blocks.pieces == asked.get("pieces", "layers") == layout["pieces"]
    assert loaded.batch.micro_rows == layout["micro_rows"]


def write_run(folder: Path, *, method: str, losses: Sequence[float]) -> None:
    """What `blocktrain compare` leaves of a run, as far as its loss goes; an evaluation every 1000 tokens."""
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    log = EventLog(folder / "events.jsonl")
    log.append(
        {
            "kind": "run", "method": method, "name": folder.name, "model": "GPT-2", "parameters": 100, "unit": "tokens",
            "tokens_per_step": 1000, "rows_per_step": 10, "optimizer": "AdamW", "precision": "fp32", "state": "drop",
            "blocks": [{"index": 0, "first": "embedding", "last": "head", "layers": 3, "parameters": 100}],
        }
    )  # fmt: skip
    for step, loss in enumerate(losses):
        now = {"step": step, "tokens": 1000 * step, "seconds": step, "visit": 0, "block": 0}
        log.append({"kind": "evaluation", **now, "loss": loss})
    log.close()


def test_a_measured_multiplier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of a comparison: BCD comes down to full training's last loss with twice the tokens."""
    write_run(tmp_path / "full", method="full", losses=(5.0, 4.0, 3.0))
    write_run(tmp_path / "bcd", method="bcd", losses=(5.0, 4.5, 4.0, 3.5, 3.0))
    found = planned(capsys, multiplier=str(tmp_path))
    assert found["multiplier"]["value"] == pytest.approx(2.0)
    assert "measured" in found["multiplier"]["source"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(arguments(multiplier=str(empty))) == 2
    assert "no multiplier is known" in capsys.readouterr().err


def test_dollars_follow_from_hours_price_and_multiplier(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, price="0.5", multiplier="worst", blocks="16")
    (best, *_) = found["layouts"]
    assert found["multiplier"]["value"] == MULTIPLIERS["worst"]
    assert float(best["usd"]) == pytest.approx(best["seconds"] / 3600 * 0.5, rel=1e-3)
    assert best["steps"] == -(-int(1e9 * 2.77) // (64 * 1024))
    same = planned(capsys, price="0.5", multiplier="1", blocks="16")
    assert float(best["usd"]) / float(same["layouts"][0]["usd"]) == pytest.approx(2.77, rel=1e-3)
    full = next(
        item for item in same["alternatives"] if item["label"] == "full-parameter" and item["card"] == "rtx4090"
    )
    assert full["break_even_multiplier"] == pytest.approx(
        float(full["layout"]["usd"]) / float(same["layouts"][0]["usd"]), rel=1e-3
    )


def test_a_budget_and_a_deadline_bind(capsys: pytest.CaptureFixture[str]) -> None:
    free = planned(capsys)["layouts"][0]
    bound = planned(capsys, budget="1usd", deadline="1h")["layouts"][0]
    assert bound["limit"] == "deadline and budget"
    assert free["limit"] in ("memory", "compute")


def test_what_does_not_fit_names_the_part_and_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, model="llama-3-8b", precision="fp32", blocks="1", method="full")
    assert found["layouts"] == []
    assert found["overflow"]["what"] == "device memory"
    assert found["overflow"]["part"] in ("active", "moments")
    assert found["nearest_change"]["peak_bytes"] < 24 * 2**30
    main(arguments(model="llama-3-70b"))
    text = capsys.readouterr().out
    assert "Nothing fits." in text
    assert "of device memory, but there are 23.1 GiB" in " ".join(text.split())
    assert "It fits with 4 times the host memory and disk" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "rtx4009"}, "GPU 'rtx4009' is unknown; did you mean 'rtx4090'?"),
        ({"gpus": "0"}, "--gpus must be a whole number from 1 to 1,000,000,000, not '0'"),
        ({"tokens": "10 bananas"}, "'10 bananas' is not a number of tokens"),
        ({"model": "lama-2-7b"}, "did you mean 'llama-2-7b'?"),
        ({"budget": "lots"}, "'lots' is not an amount of money"),
        ({"deadline": "soon"}, "'soon' is not a span of time"),
        ({"method": "bdc"}, "did you mean 'bcd'?"),
        ({"blocks": "99"}, "--blocks must be 'auto' or a whole number from 1 to 34"),
        ({"multiplier": "great"}, "multiplier 'great' is neither a number"),
        ({"precision": "fp16"}, "precision 'fp16' is unknown"),
        ({"gpu": "v100", "precision": "bf16-exact"}, "has no fast matrix products in bf16-exact"),
        ({"model": "gpt2", "seq": "4096"}, "longer than the 1024 positions"),
        ({"moments": "8bit", "loss_chunk": "some"}, "--loss-chunk must be 'auto', 'off' or a whole number"),
        ({"largest": "100"}, "has 4096 parameters; allow at least that many"),
        ({"largest": "100000000", "blocks": "3"}, "--blocks or --largest, not both"),
        ({"largest": "100000000", "pieces": "modules"}, "--largest cuts inside layers by itself"),
        ({"provider": "nobody"}, "provider 'nobody' is unknown"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    changes: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(**changes)) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_config_without_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in TINY.items() if key != "n_layer"}))
    assert main(arguments(model=str(path))) == 2
    assert "has no 'n_layer', so its size is unknown" in capsys.readouterr().err


@pytest.mark.parametrize("cache", ["off", "host"])
def test_the_written_configuration_trains(cache: str, tmp_path: Path, text_file: Path, capsys) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    out = tmp_path / "run.toml"
    wanted = arguments(model=str(config), tokens="20k", seq="16", rows="4", cache=cache, blocks="3", precision="fp32")
    assert main([*wanted, "--checkpointing", "none", "--out", str(out)]) == 0
    loaded = RunConfig.load(out)
    assert loaded.blocks.count == 3
    assert loaded.prefix.store == cache
    overrides = ["--set", f"text.source={text_file}", "--set", "stop.duration=4 steps", "--set", "device=cpu"]
    overrides += ["--set", "evaluation.rows=4", "--set", f"text.cache={tmp_path}", "--set", "text.validation_share=0.2"]
    assert main(["train", str(out), *overrides, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main([*wanted, "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_layout_that_train_cannot_run_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments(gpus="2"), "--out", str(tmp_path / "run.toml")]) == 2
    assert "plan with --gpus 1" in capsys.readouterr().err
    assert not (tmp_path / "run.toml").exists()


def test_the_page_has_bars_a_limit_and_dots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main([*arguments(method="all"), "--html", str(page)]) == 0
    text = page.read_text()
    for word in (
        "Memory of a card",
        "Cost against time",
        "the card holds",
        'class="mark"',
        'class="dot',
        "What this rests on",
    ):
        assert word in text
    assert "events.jsonl" not in text


def test_verify_runs_the_tracker(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = arguments(model="gpt2", seq="128", rows="1", blocks="3", precision="fp32")
    assert main([*wanted, "--verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tracked_peak_bytes"] == pytest.approx(found["layouts"][0]["peak_bytes"], rel=0.05)


def test_calibrate_stores_rates_that_plan_uses(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(arguments(gpu="this-machine")) == 2
    assert "run 'blocktrain calibrate'" in capsys.readouterr().err
    monkeypatch.setattr("blocktrain.plan.calibrate.TRIES", 1)
    assert main(["calibrate"]) == 0
    assert "this-machine.json" in capsys.readouterr().out.replace("\n", "")
    stored = json.loads((tmp_path / "blocktrain" / "this-machine.json").read_text())
    assert not {"peer_link_bytes", "network_bytes"} & stored["rates"].keys()  # there is nothing to measure them with
    found = planned(capsys, model="gpt2", gpu="this-machine", tokens="1M", precision="fp32")
    assert found["rates"]["kind"] == "measured"
    assert found["rates"]["other_kinds"] == {"peer_link_bytes": "paper", "network_bytes": "paper"}
    assert found["layouts"][0]["tokens_per_second"] > 1
    assert any("measured on this machine" in line for line in found["assumptions"])
    assert any("network 5 GB/s (paper)" in line for line in found["assumptions"])


def test_a_disk_that_was_not_measured_is_assumed(tmp_path: Path, monkeypatch, capsys) -> None:
    """calibrate stored 0.1 GB/s as measured where it could not write."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("blocktrain.plan.calibrate.TRIES", 1)
    monkeypatch.setattr("blocktrain.plan.calibrate.file_rates", lambda *_args, **_keywords: {})
    assert main(["calibrate"]) == 0
    assert "not measured" in capsys.readouterr().out
    rates = planned(capsys, model="gpt2", gpu="this-machine", tokens="1M", precision="fp32")["rates"]
    assert rates["disk_bytes"] == load_hardware().assumed.disk_bytes_per_second
    assert rates["other_kinds"]["disk_bytes"] == "assumed"


def test_rates_of_a_rented_machine_that_nobody_published_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys)
    assert found["rates"]["kind"] == "published"
    assert set(found["rates"]["other_kinds"]) == {"kernel_seconds", "host_memory_bytes", "disk_bytes"}
    assert "disk 3 GB/s (assumed)" in found["assumptions"][0]


@pytest.mark.parametrize("width", ["40", "60", "80", "100"])
def test_no_value_is_cut_off_in_a_narrow_terminal(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 60 columns a cost was "$70...", and at 40 the memory "19...."."""
    monkeypatch.setenv("COLUMNS", width)
    assert main(["plan", "--model", "llama-3-8b", "--gpu", "rtx4090", "--tokens", "1B"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= int(width)
    for value in ("bf16-exact", "$39.82", "19.9 G", "14.8 GiB", "23.3 s", "B-F 4.23", "$70.34"):
        assert value in text.replace("\n", " "), value

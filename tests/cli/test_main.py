"""The command line as a person meets it: what it prints, what it leaves behind, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import blocktrain as bt
from blocktrain.cli.main import main
from blocktrain.errors import ConfigError
from blocktrain.train.run_folder import RunFolder


def test_help_answers_in_half_a_second() -> None:
    seconds, text = [], ""
    for _ in range(3):
        start = time.perf_counter()
        text = subprocess.check_output([sys.executable, "-m", "blocktrain", "--help"], text=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5
    for command in ("train", "resume", "compare", "report", "export", "doctor"):
        assert command in text


def test_train_prints_the_table_and_the_report(config_file: Path, tmp_path: Path, capsys) -> None:
    assert main(["train", str(config_file), "--out", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "block 0  embedding" in out
    assert "validation loss, nats per byte" in out
    assert "counted" in out
    assert f"report  {tmp_path / 'run' / 'report.html'}\n" in out
    last = " ".join(out.partition("\nreport ")[2].split())
    assert "Saved against full training: a step's memory at its largest is" in last
    assert "The cost: each weight was updated in" in last
    assert last.endswith("`blocktrain compare` measures it on your model and data, and the time.")
    assert "<html" in (tmp_path / "run" / "report.html").read_text()[:200]


def test_json_is_json_and_nothing_else(config_file: Path, tmp_path: Path, capsys) -> None:
    assert main(["train", str(config_file), "--out", str(tmp_path / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (run,) = result["runs"]
    assert run["steps"] == 12
    assert result["report"].endswith("report.html")
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == [run]
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtypes"]["float32"] is True


def test_the_default_folder_is_numbered(config_file: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["--set", "schedule.visit=1 steps", "--json"]
    for name in ("tiny", "tiny-2"):
        assert main(["train", str(config_file), *short]) == 0
        assert (tmp_path / "runs" / name / "run.json").is_file()


def test_export_loads_with_from_pretrained(config_file: Path, tmp_path: Path, capsys) -> None:
    assert main(["train", str(config_file), "--out", str(tmp_path / "run"), "--set", "precision=bf16-exact"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32
    (end,) = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1:]]
    from blocktrain.data.text import TextConfig, open_text
    from blocktrain.train.run_folder import RunFolder

    config = RunFolder(tmp_path / "run").config().data
    assert isinstance(config, TextConfig)
    rows = open_text(config).validation
    model.eval()
    with torch.no_grad():
        losses = [float(model(**rows.batch(range(start, start + 4))).loss) for start in (0, 4)]
    assert sum(losses) / 2 == pytest.approx(end["loss"], rel=2e-3)  # the run computed in bf16, the export is fp32
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 2
    assert "already exists and is not empty" in capsys.readouterr().err


def test_compare_trains_both_on_the_same_tokens(config_file: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "both"
    assert main(["compare", str(config_file), "--out", str(out), "--json"]) == 0
    full, bcd = json.loads(capsys.readouterr().out)["runs"]
    assert full["tokens"] == bcd["tokens"]
    assert full["blocks"] == 1
    assert bcd["blocks"] == 3
    assert (out / "report.html").is_file()
    assert main(["compare", str(config_file), "--out", str(out)]) == 0  # nothing is trained again
    assert "B-F multiplier" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_signals_end_a_real_process_with_their_code(config_file: Path, tmp_path: Path, number: int, code: int) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("this signal is ignored here, and so by the processes begun here (nohup)")
    run = tmp_path / "run"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "blocktrain", "train", str(config_file), "--out", str(run)),
            *("--set", "schedule.visit=100000 steps", "--set", "blocks.count=1", "--set", "model.config.n_layer=1"),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    while not ((run / "events.jsonl").exists() and '"step":3,' in (run / "events.jsonl").read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"go on with: blocktrain resume {run}" in errors
    assert "Traceback" not in errors
    assert list((run / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_and_the_first_says_so(config_file: Path, tmp_path: Path) -> None:
    """Nothing said that a second one helps. The step is long, so that the second one comes before its end."""
    run = tmp_path / "run"
    sizes = ["model.config.n_embd=768", "model.config.n_layer=4", "blocks.count=1", "batch.rows=32"]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "blocktrain", "train", str(config_file), "--out", str(run)),
            *(part for key in [*sizes, "schedule.visit=100000 steps"] for part in ("--set", key)),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    while not ((run / "events.jsonl").exists() and '"step":1,' in (run / "events.jsonl").read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    while "press Ctrl-C again to stop at once" not in (line := process.stderr.readline()):
        assert line, "the process has ended without a hint"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "blocktrain: stopped\n"  # and no tracebacks
    assert not list((run / "checkpoints").glob("step-*"))


BAD = {
    "unknown key": (
        ["--set", "optimizer.learning_rate=1"],
        "unknown key 'optimizer.learning_rate'; here 'learning_rate' is optimizer.lr",
    ),
    "key like none": (["--set", "optimizer.zzz=1"], "unknown key 'optimizer.zzz'; known: decay, in_backward, lr"),
    "mistyped key": (
        ["--set", "optimizer.weight_deacy=1"],
        "unknown key 'optimizer.weight_deacy'; did you mean 'weight_decay'?",
    ),
    "wrong type": (["--set", "batch.rows=many"], "batch.rows must be a whole number, not 'many'"),
    "no blocks": (["--set", "blocks.count=0"], "[blocks] count must be at least 1, not 0"),
    "too many blocks": (["--set", "blocks.count=99"], "99 blocks need at least 99 layers; the model has 6"),
    "pattern": (["--set", 'blocks.patterns=[["h.0"], ["*"]]'], "pattern 'h.0' of block 0 matches no layer"),
    "long rows": (["--set", "text.row_tokens=99"], "row_tokens = 99 is longer than the model's 16 positions"),
    "small vocabulary": (
        ["--set", "model.config.vocab_size=100"],
        "vocabulary (100) is smaller than the tokenizer's (257)",
    ),
    "missing data": (["--set", "text.source=nowhere.txt"], "nowhere.txt"),
    "unknown model": (
        ["--set", "model.architecture=gtp2"],
        "model.architecture 'gtp2' is unknown; did you mean 'gpt2'?",
    ),
    "sizes that do not go together": (
        ["--set", "model.config.n_head=3"],
        "[model.config] makes no 'gpt2': `embed_dim` must be divisible by num_heads",
    ),
    "no such tokenizer": (["--set", "text.tokenizer=./gone"], "tokenizer './gone' is not a folder (seen from "),
    "half precision": (["--set", "precision=fp16"], "precision 'fp16' is unknown; did you mean 'bf16-exact'?"),
    "no residuals to zero": (
        ["--set", "model.architecture=resnet20", "--set", "model.zero_residuals=true"],
        "zero_residuals = true is for transformers, not for 'resnet20'; leave it out",
    ),
    "another case": (["--set", "optimizer.name=Adamw"], "did you mean 'AdamW'?"),
    "unknown setting": (
        ["--set", "model.config.layers=2"],
        "unknown key 'model.config.layers' for architecture 'gpt2'",
    ),
    "unknown optimizer": (
        ["--set", "optimizer.name=AdamV"],
        "'AdamV' is neither a class of torch.optim that can train",
    ),
    "bad option": (["--set", "optimizer.options.beta=3"], "[optimizer] AdamW has no 'beta'; did you mean 'betas'?"),
    "duration": (["--set", "schedule.visit=10 bananas"], "schedule.visit: '10 bananas' is not a duration"),
    "order": (["--set", "schedule.order=[0, 7]"], "order names block 7; the partition has blocks 0 to 2"),
    "endless": (["--set", "schedule.sweeps=0"], "sweeps must be at least 1"),
    "batch": (["--set", "batch.rows=100000"], "only"),
    "micro batch": (["--set", "batch.micro_rows=3"], "micro_rows = 3 must divide rows = 4"),
    "device": (["--set", "device=cuda:7"], "device 'cuda:7' cannot be used here"),
    "precision": (["--set", "precision=fp23"], "precision 'fp23' is unknown; did you mean 'fp32'?"),
    "no equals sign": (["--set", "batch"], "--set 'batch' is not of the form a.b=c"),
    "resnet on text": (["--set", "model.architecture=resnet20"], "'resnet20' classifies images; give [images]"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_message_and_leaves_nothing(
    config_file: Path, tmp_path: Path, capsys, arguments: list[str], message: str
) -> None:
    run = tmp_path / "run"
    assert main(["train", str(config_file), "--out", str(run), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("blocktrain: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not run.exists()


def test_a_model_cut_short_is_one_message(config_file: Path, tmp_path: Path, capsys) -> None:
    short = ["--set", "schedule.visit=1 steps"]
    assert main(["train", str(config_file), "--out", str(tmp_path / "run"), *short]) == 0
    model = tmp_path / "model"
    assert main(["export", str(tmp_path / "run"), str(model)]) == 0
    os.truncate(model / "model.safetensors", 5000)
    capsys.readouterr()
    config = RunFolder(tmp_path / "run").config().to_mapping()
    config["model"] = {"path": str(model)}
    with pytest.raises(ConfigError, match=f"weights at model.path '{model}' are damaged, or not all there: "):
        bt.run(bt.RunConfig.from_mapping(config), tmp_path / "again")
    config["model"] = {"path": "./gone"}
    with pytest.raises(ConfigError, match=r"model.path './gone' is no folder \(seen from "):
        bt.run(bt.RunConfig.from_mapping(config), tmp_path / "again")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("", "the name of a file or folder to write is empty"),
        ("a\x1b[31mred", "it has control characters"),
        ("x" * 300, "it is longer than 240 bytes"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused(config_file: Path, capsys, out: str, message: str) -> None:
    assert main(["train", str(config_file), "--out", out]) == 2
    assert message in capsys.readouterr().err


def test_a_tilde_is_the_home_folder(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--out=~/x`, which no shell expands, used to make a folder that is named `~`."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(config_file), "--out=~/run"]) == 0
    assert (tmp_path / "home" / "run" / "events.jsonl").is_file()
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("name", ["", "..", ". .", "two\nlines", "\x1b[31mred", "x" * 101])
def test_a_name_that_is_no_name_is_refused(tiny, name: str) -> None:
    """`name = ".."` used to write into the working folder."""
    with pytest.raises(
        ConfigError, match=r"name must be 1 to 100 printable characters, not|name has control characters"
    ):
        tiny(f"name={json.dumps(name)}")


def test_bad_files_are_one_message(tmp_path: Path, capsys) -> None:
    (tmp_path / "bad.toml").write_text("a = = 1")
    cases = [
        (["train", str(tmp_path / "none.toml")], "does not exist"),
        (["train", str(tmp_path / "bad.toml")], "is not TOML"),
        (["resume", str(tmp_path)], "is not the folder of a run"),
        (["report", str(tmp_path)], "does not exist"),
        (["export", str(tmp_path), str(tmp_path / "x")], "is not the folder of a run"),
    ]
    for arguments, message in cases:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_run_is_never_overwritten(config_file: Path, tmp_path: Path, capsys) -> None:
    short = ["--set", "schedule.visit=1 steps"]
    assert main(["train", str(config_file), "--out", str(tmp_path / "run"), *short]) == 0
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    assert main(["train", str(config_file), "--out", str(tmp_path / "run"), *short]) == 2
    assert "already holds a run; go on with 'blocktrain resume" in capsys.readouterr().err
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


def test_a_damaged_checkpoint_is_one_message(config_file: Path, tmp_path: Path, capsys) -> None:
    assert main(["train", str(config_file), "--out", str(tmp_path / "run")]) == 0
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    (newest / "weights-1.safetensors").write_bytes(b"junk")
    assert main(["resume", str(tmp_path / "run")]) == 2
    assert "is damaged: its checksum is wrong; " in capsys.readouterr().err


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    from blocktrain.errors import ConfigError

    with pytest.raises(ConfigError):
        main(["train", str(tmp_path / "none.toml"), "--debug"])


@pytest.mark.parametrize(("given", "used"), [(None, "expandable_segments:True"), ("backend:native", "backend:native")])
def test_the_allocator_s_segments_grow_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys, given: str | None, used: str
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
    assert main(["config"]) == 0
    found = {name: value for name, value in os.environ.items() if name.endswith("_ALLOC_CONF")}
    assert list(found.values()) == [used]

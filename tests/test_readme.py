"""Every command of the README, typed as a reader would; runs are shortened."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from blocktrain.cli.main import main

ROOT = Path(__file__).resolve().parent.parent

SHORT = [
    *("schedule.visit=2 steps", "schedule.sweeps=1", "evaluation.rows=8", "batch.rows=4", "model.config.n_layer=3"),
    *("model.config.n_embd=32", "model.config.n_head=2", "learning_rate.warmup_steps=2", "text.max_documents=40"),
]
SET = [word for key in SHORT for word in ("--set", key)]
CONFIG = ["examples/quickstart.toml", *SET]

# What the README says -> what is typed; in the order of its table, in one folder. `--push` is for tests/integrations.
TYPED = {
    "blocktrain train CONFIG [--set a.b=c ...] [--out DIR]": ["train", *CONFIG, "--out", "run"],
    "blocktrain resume DIR": ["resume", "run", "--set", "precision=bf16-exact"],
    "torchrun --nproc-per-node 8 -m blocktrain train CONFIG": [
        *("--nproc-per-node", "2", "-m", "blocktrain", "train", *CONFIG),
    ],
    "blocktrain compare CONFIG [--methods full,bcd,uncached]": [
        *("compare", *CONFIG, "--methods", "full,bcd", "--out", "both"),
    ],
    "blocktrain plan --model NAME --tokens 10B --gpu rtx4090 --gpus 8": [
        *("plan", "--model", "llama-2-7b", "--tokens", "10B", "--gpu", "rtx4090", "--gpus", "8"),
    ],
    "blocktrain calibrate": ["calibrate"],
    "blocktrain report DIR...": ["report", "run", "both/full", "--out", "page.html"],
    "blocktrain export DIR OUT [--push OWNER/NAME]": ["export", "run", "exported"],
    "blocktrain config": ["config"],
    "blocktrain doctor": ["doctor"],
}


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = re.findall(r"^\| `([^`]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert told == list(TYPED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command, words in TYPED.items():
        if command.startswith("torchrun"):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            assert subprocess.run([*torchrun, *words], capture_output=True, check=False).returncode == 0, command
        else:
            assert main(words) == 0, command
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "runs" / "quickstart" / "report.html").is_file()
    assert (tmp_path / "exported" / "config.json").is_file()

"""What do kills cost? A job of several processes runs under torchrun; one of them is killed with
SIGKILL at random moments.

    python benchmarks/distributed/faults.py [--kills 6] [--processes 2] [--layout data] [--out FILE]

torchrun starts the context again each time, by itself. At each kill the last logged step and the newest checkpoint are
noted; the next session says where it went on. At the end the files are compared with those of a context left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blocktrain.records.log import read_events
from blocktrain.runtime import environment, pick_device, result_path
from blocktrain.train.checkpoint import checkpoints

INTERVAL = 10  # steps between checkpoints

CONFIG = f"""
name = "faults"
device = "cpu"
[text]
source = "stdlib"
row_tokens = 32
[model]
architecture = "gpt2"
[model.config]
n_layer = 3
n_embd = 32
n_head = 2
n_positions = 32
resid_pdrop = 0.1
embd_pdrop = 0.1
attn_pdrop = 0.1
[blocks]
count = 3
[schedule]
visit = "50 steps"
sweeps = 2
[optimizer]
state = "host"
[batch]
rows = 8
[evaluation]
every = "100 steps"
rows = 16
[checkpoint]
every = "{INTERVAL} steps"
[distributed]
timeout_seconds = 60
layout = "LAYOUT"
"""


def launch(config: Path, out: Path, processes: int, restarts: int) -> subprocess.Popen[bytes]:
    """The context under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["--max-restarts", str(restarts), "-m", "blocktrain", "train", str(config), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def workers(agent: int) -> list[int]:
    """Process ids of torchrun's children that train."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if parent == agent and b"blocktrain" in words:
                found.append(int(entry.name))
    return sorted(found)


def standing(out: Path) -> tuple[int, int, int]:
    """Last step logged, step of the newest checkpoint, sessions begun."""
    if not (out / "run.json").exists():
        return 0, 0, 0
    steps = [event["step"] for event in read_events(out / "events.jsonl") if event["kind"] == "step"]
    saved = [int(path.name.removeprefix("step-")) for path in checkpoints(out / "checkpoints")]
    sessions = json.loads((out / "run.json").read_text())["sessions"]
    return max(steps, default=0), max(saved, default=0), len(sessions)


def killed(config: Path, out: Path, processes: int, moments: list[int], chance: random.Random) -> list[dict[str, Any]]:
    """Run the context; soon after each of `moments` (steps) kill one of its processes. What was seen of each kill."""
    kills: list[dict[str, Any]] = []
    context = launch(config, out, processes, len(moments))
    try:
        for moment in moments:
            while not (
                (out / "events.jsonl").exists() and standing(out)[0] >= moment and standing(out)[2] > len(kills)
            ):
                if context.poll() is not None:
                    raise RuntimeError(f"the context ended before step {moment} with exit code {context.returncode}")
                time.sleep(0.02)
            time.sleep(0.1 * chance.random())
            rank = chance.randrange(processes)
            os.kill(workers(context.pid)[rank], signal.SIGKILL)
            step, saved, _ = standing(out)
            kills.append({"rank": rank, "at_step": step, "newest_checkpoint": saved})
        if context.wait() != 0:
            raise RuntimeError(f"the context ended with exit code {context.returncode}")
    finally:
        context.kill()
    sessions = json.loads((out / "run.json").read_text())["sessions"]
    for kill, session in zip(kills, sessions[1:], strict=True):
        kill["went_on_at"] = session["step"]
        kill["steps_lost"] = max(0, kill["at_step"] - session["step"])
        kill["checkpoint_lost"] = session["step"] < kill["newest_checkpoint"]
    return kills


def learned(out: Path) -> dict[str, str]:
    """SHA-256 of the last checkpoint's files: weights, moments."""
    manifest = json.loads((checkpoints(out / "checkpoints")[-1] / "checkpoint.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items()}


def curve(out: Path) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in read_events(out / "events.jsonl") if event["kind"] == "step"]


def measure(kills: int, processes: int, layout: str, seed: int) -> dict[str, Any]:
    """The result as a JSON-able dictionary."""
    chance = random.Random(seed)
    moments = sorted(chance.sample(range(3, 290), kills))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.toml").write_text(CONFIG.replace("LAYOUT", layout))
        alone = launch(folder / "config.toml", folder / "alone", processes, 0)
        if alone.wait() != 0:
            raise RuntimeError(f"the context that was left alone ended with exit code {alone.returncode}")
        seen = killed(folder / "config.toml", folder / "killed", processes, moments, chance)
        return {
            "question": "what do kills with SIGKILL cost a context under torchrun?",
            "processes": processes,
            "layout": layout,
            "checkpoint_interval_steps": INTERVAL,
            "kills": seen,
            "checkpoints_lost": sum(kill["checkpoint_lost"] for kill in seen),
            "most_steps_lost": max(kill["steps_lost"] for kill in seen),
            "same_files_as_uninterrupted": learned(folder / "killed") == learned(folder / "alone"),
            "same_losses_each_step_once": curve(folder / "killed") == curve(folder / "alone"),
            "environment": environment(pick_device("cpu")),
            "date": datetime.now(UTC).date().isoformat(),
        }


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layout", default="data", choices=("data", "pipeline", "fsdp"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("faults.json")))
    options = parser.parse_args()
    result = measure(options.kills, options.processes, options.layout, options.seed)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("| killed rank | at step | newest checkpoint | went on at | steps lost |")
    print("|---|---|---|---|---|")
    for kill in result["kills"]:
        print(
            "| "
            + " | ".join(str(kill[k]) for k in ("rank", "at_step", "newest_checkpoint", "went_on_at", "steps_lost"))
            + " |"
        )
    print(
        f"\nfinal files equal: {result['same_files_as_uninterrupted']}; losses: {result['same_losses_each_step_once']}"
    )


if __name__ == "__main__":
    main()

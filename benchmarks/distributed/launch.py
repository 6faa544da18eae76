"""Do the two launch files of docs/cluster.md work? Run as they are written, with stand-ins for the cluster.

    python benchmarks/distributed/launch.py [--out benchmarks/distributed/launch.json]

Two machines of two processes each, all of them here, with gloo on CPUs. Slurm: `srun` starts its command once a
machine, `scontrol` names the machines; the job is told to end (SIGTERM to srun's tasks, as `--signal=TERM@120` does)
in mid-run, then the same line is submitted again with one machine. SkyPilot: the `run` section once a machine, with
the variables that a task is given. What differs from the page: two processes a machine instead of eight, and where
runs lie.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from blocktrain.records.log import read_events
from blocktrain.runtime import environment, result_path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"
MACHINES, PROCESSES, STEPS, END_AT = 2, 2, 60, 15
CONFIG = f"""
device = "cpu"

[text]
source = "stdlib"
tokenizer = "bytes"
row_tokens = 32

[model]
architecture = "gpt2"

[model.config]
n_layer = 4
n_embd = 32
n_head = 2
n_positions = 32

[schedule]
visit = "10 steps"

[stop]
duration = "{STEPS} steps"

[checkpoint]
every = "1000 steps"
"""
SRUN = """#!/bin/bash
echo $$ > "$STANDIN/srun.pid"
trap 'kill -TERM $(jobs -p)' TERM
for machine in $(seq $SLURM_NNODES); do "$@" & done
for task in $(jobs -p); do
  wait $task; code=$?
  while kill -0 $task 2> /dev/null; do wait $task; code=$?; done
  [ $code = 0 ] || failed=$code
done
exit ${failed:-0}
"""
SCONTROL = f"#!/bin/bash\nfor machine in $(seq {MACHINES}); do echo localhost; done\n"


def blocks_of(page: Path) -> dict[str, str]:
    """The page's last shell script and its YAML file."""
    found = dict(re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL))
    return {"slurm": found["sh"], "sky": found["yaml"]}


def here(text: str, folder: Path) -> str:
    """With as many processes as this machine can do, and runs in `folder`."""
    return text.replace("--nproc-per-node=8", f"--nproc-per-node={PROCESSES}").replace("/runs/mine", str(folder))


def on_slurm(place: Path, script: str, machines: int) -> subprocess.Popen[bytes]:
    """`sbatch --nodes=machines train.sbatch CONFIG DIR`."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("train.sbatch", here(script, place))):
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    context = {"SLURM_NNODES": str(machines), "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "here"}
    env = {**os.environ, **context, "PATH": f"{place}:{os.environ['PATH']}", "STANDIN": str(place)}
    return subprocess.Popen([place / "train.sbatch", place / "run.toml", place / "slurm"], env=env)


def steps_of(run: Path) -> list[int]:
    """Those that its log has."""
    log = run / "events.jsonl"
    return [event["step"] for event in read_events(log) if event["kind"] == "step"] if log.exists() else []


def slurm(place: Path, script: str) -> dict[str, Any]:
    """A context on two machines that is told to end, and the same line again on one."""
    first, run = on_slurm(place, script, MACHINES), place / "slurm"
    while first.poll() is None and len(steps_of(run)) < END_AT:
        time.sleep(0.2)
    os.kill(int((place / "srun.pid").read_text()), signal.SIGTERM)
    codes = [first.wait(), on_slurm(place, script, 1).wait()]
    return {"exit_codes": codes, **told(run)}


def sky(place: Path, text: str) -> dict[str, Any]:
    """The task on two machines."""
    section = text.partition("run: |\n")[2]
    given = {
        "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * MACHINES),
        "SKYPILOT_NUM_NODES": str(MACHINES),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(PROCESSES),
        "CONFIG": str(place / "run.toml"),
    }
    tasks = [
        subprocess.Popen(
            ["bash", "-c", here(section, place / "sky")], env={**os.environ, **given, "SKYPILOT_NODE_RANK": str(rank)}
        )
        for rank in range(MACHINES)
    ]
    return {"exit_codes": [task.wait() for task in tasks], **told(place / "sky")}


def told(run: Path) -> dict[str, Any]:
    """What the run's folder says."""
    sessions = json.loads((run / "run.json").read_text())["sessions"]
    return {
        "processes": [session["processes"] for session in sessions],
        "begun_at_step": [session["step"] for session in sessions],
        "every_step_once": steps_of(run) == list(range(1, STEPS + 1)),
    }


def main() -> None:
    """Run both, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("launch.json")))
    options = parser.parse_args()
    files = blocks_of(PAGE)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "run.toml").write_text(CONFIG)
        found = {"slurm": slurm(place, files["slurm"]), "skypilot": sky(place, files["sky"])}
    result = {
        "question": "do the launch files of docs/cluster.md start, end and go on with a context of several machines",
        "machines": f"{MACHINES} of {PROCESSES} processes, all on this one; then, with Slurm, 1",
        "date": datetime.now(UTC).date().isoformat(),
        "environment": environment(torch.device("cpu")),
        **found,
    }
    print(json.dumps(found, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

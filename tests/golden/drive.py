"""Carrying the runs out, in a process in which arithmetic depends on the processor no more than it must.

`carry_out` starts `python drive.py FOLDER NAME...`, which leaves FOLDER/NAME.json for each run: what `recording.py`
says is kept of it, or `{"failed": traceback}`.

The package is used through its public names and its command line alone, but for what `run_in_processes` needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from recording import Recording, recorded_folder, written
from runs import CRASHED, RUNS, SIGNALLED, file_of, write_data

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"  # where the rivals' adapters are

# Kernels of PyTorch, MKL and oneDNN that every x86 processor has; one thread, so that sums have one order.
PINNED = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "DNNL_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def carry_out(folder: Path, names: Sequence[str]) -> dict[str, Recording]:
    """The recordings of `names`, whose runs are left in `folder`; what they print comes with an error only."""
    path = os.pathsep.join([str(EXPERIMENTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **PINNED, "PYTHONPATH": path}
    command = [sys.executable, str(Path(__file__).resolve()), str(folder), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise RuntimeError(f"the runs could not be carried out:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


def main(folder: Path, names: Sequence[str]) -> None:
    """Each run in turn, from inside `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    write_data(Path())
    machine = told_of_machine()
    for name in names:
        started = time.perf_counter()
        try:
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                train(name)
            found = recording_of(name, machine)
        except Exception:
            found = {"failed": traceback.format_exc()}
        Path(f"{name}.json").write_text(written(found))
        print(f"{time.perf_counter() - started:5.1f} s  {name}", flush=True)


# -- one run ----------------------------------------------------------------------------------------------------------


def train(name: str) -> None:
    """The run `name`, into the folder of that name."""
    run, config = RUNS[name], Path(f"{name}.toml")
    config.write_text(file_of(name))
    match run.command:
        case "compare":
            sets = [word for override in run.overrides for word in ("--set", override)]
            command_line("compare", str(config), "--methods", ",".join(run.methods), *sets, "--out", name)
        case "interrupted":
            train_with_interruptions(name)
        case _ if run.processes > 1:
            run_in_processes(train_alone, run.processes, name)
        case _:
            train_alone(name)
    if run.exported:
        command_line("export", name, f"{name}-exported")


def train_alone(name: str) -> None:
    """In this process, or as one of several that have found each other."""
    import blocktrain as bt
    from blocktrain.errors import NonFiniteError

    with contextlib.suppress(*([NonFiniteError] if RUNS[name].diverges else [])):
        bt.run(bt.RunConfig.load(f"{name}.toml", RUNS[name].overrides), name)


class Crash(BaseException):
    """As sudden as the power going: nothing is written."""


def train_with_interruptions(name: str) -> None:
    """Stopped by a signal, which leaves a checkpoint; then by a crash, which leaves none; then to the end."""
    import blocktrain as bt
    from blocktrain.records.run_records import Record, Step

    def stop(record: Record) -> None:
        if isinstance(record, Step) and record.step == SIGNALLED:
            os.kill(os.getpid(), signal.SIGTERM)

    def crash(record: Record) -> None:
        if isinstance(record, Step) and record.step == CRASHED:
            raise Crash

    config = bt.RunConfig.load(f"{name}.toml", RUNS[name].overrides)
    try:
        bt.run(config, name, listeners=[stop])
    except bt.BlocktrainError as error:
        if error.exit_code != 128 + signal.SIGTERM:
            raise
    with contextlib.suppress(Crash):
        bt.resume(name, listeners=[crash])
    bt.resume(name)


def command_line(*words: str) -> None:
    """`python -m blocktrain WORDS`, without another process."""
    before, sys.argv = sys.argv, ["blocktrain", *words]
    try:
        runpy.run_module("blocktrain", run_name="__main__")
    except SystemExit as done:
        if done.code:
            raise RuntimeError(f"blocktrain {' '.join(words)} exits with {done.code}") from done
    finally:
        sys.argv = before


def run_in_processes(work: Callable[[str], None], processes: int, name: str) -> None:
    """Call `work(name)` in several processes that form a group: the one private thing that the runs need."""
    from blocktrain.testing import run_distributed

    run_distributed(work, processes, name)


# -- what is kept -----------------------------------------------------------------------------------------------------


def recording_of(name: str, machine: dict[str, str]) -> Recording:
    """What is kept of a run that has been carried out."""
    run = RUNS[name]
    found: Recording = {"covers": run.covers, "machine": machine}
    found["folders"] = {folder: recorded_folder(Path(name, folder)) for folder in run.folders}
    if run.exported:
        weights = Path(f"{name}-exported", "model.safetensors")
        found["exported"] = {weights.name: hashlib.sha256(weights.read_bytes()).hexdigest()}
    if run.command == "compare":
        found["trials"] = json.loads(Path(name, "trials.json").read_text())
    return found


def told_of_machine() -> dict[str, str]:
    """What bits depend on: the versions of the libraries that compute, and a fingerprint of this machine's sums."""
    import torch
    import transformers

    versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    return {**versions, "arithmetic": fingerprint()}


def fingerprint() -> str:
    """A hash of drawn numbers, products, convolutions, attention and elementary functions, forward and backward, in
    fp32 and bf16."""
    import torch
    from torch.nn import functional as F

    torch.manual_seed(0)
    digest = hashlib.sha256()

    def add(value: torch.Tensor) -> None:
        digest.update(value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())

    drawn = torch.randn(3, 37, 48)
    add(drawn)
    for dtype in (torch.float32, torch.bfloat16):
        x = drawn.to(dtype, copy=True).requires_grad_(True)
        square, images = torch.randn(48, 48).to(dtype), torch.randn(2, 3, 16, 16).to(dtype)
        heads = (x @ square).view(3, 37, 4, 12).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        normed = F.layer_norm(F.gelu(x, approximate="tanh") + F.silu(x), (48,))
        loss = F.cross_entropy((normed @ square)[:, :, :29].flatten(0, 1), torch.arange(111) % 29)
        loss = loss + attended.float().square().mean() + F.softmax(heads, -1).float().std()
        loss.backward()
        assert x.grad is not None
        for value in (attended, normed, loss, x.grad, F.conv2d(images, torch.randn(8, 3, 3, 3).to(dtype), padding=1)):
            add(value)
    for function in (torch.exp, torch.tanh, torch.erf, torch.sin, torch.log1p, torch.rsqrt, torch.sum, torch.var):
        add(function(drawn.abs()))
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

"""What does SIGKILL cost a run? Runs of all techniques are killed again and again at random moments and resumed.

    python benchmarks/endurance/kills.py --kills 140
    python benchmarks/endurance/kills.py --kills 70 --processes 2 --out benchmarks/endurance/kills-processes.json

The runs are those of `tests/golden/runs.py`. Each is trained once undisturbed. Then it is trained in chains: killed,
resumed, killed, and so on until a session reaches the end. A kill comes at a random time after a random call of a
random function out of `MOMENTS`, or at a random time of the whole session. Just before it the process writes down where
it is (`faulthandler`). Of a run in two processes both are killed, one shortly after the other, as a job's manager does.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import inspect
import json
import multiprocessing
import os
import pkgutil
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "golden"))

from recording import recorded_folder  # noqa: E402  # pyright: ignore[reportMissingImports]
from runs import RUNS, STILL, file_of, write_data  # noqa: E402  # pyright: ignore[reportMissingImports]

from blocktrain.testing import _PRELOADED  # noqa: E402
from blocktrain.train.checkpoint import checkpoints, step_of  # noqa: E402

MOMENTS = {
    "loading": "blocktrain.train.run.build",
    "data cache": "blocktrain.data.cache_folder._locked",
    "packing": "blocktrain.optim.weight_store.WeightStore.store",
    "block switch": "blocktrain.optim.block_optimizer.BlockOptimizer._activate",
    "retiring": "blocktrain.optim.block_optimizer.BlockOptimizer._retire",
    "moments to disk": "blocktrain.optim.state_store.KeepOnDisk._write",
    "cache filling": "blocktrain.cache.prefix_cache.PrefixCache._write",
    "checkpoint": "blocktrain.train.gathered_state.save_checkpoint",
    "restoring": "blocktrain.train.trainer.load_checkpoint",
    "evaluation": "blocktrain.train.trainer.evaluate",
    "step": "blocktrain.train.trainer.take_step",
    "run.json": "blocktrain.train.run_folder.write_output",
}
# Name -> (run of `RUNS`, more overrides)
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, ()) for name, run in RUNS.items() if name not in ("skipped", "compared", "interrupted")},
    "cache-on-device": ("cache-in-memory", ("prefix.store=device",)),
    "muon-sgd-tail-file-cache": ("interrupted", ()),
    "two-processes-file-cache": ("two-processes", ("prefix.store=file", "prefix.fill=ahead")),
    "local-steps-still": ("local-steps", STILL),
}
SAVED = f"checkpoint.every={(INTERVAL := 4)} steps"
LONGEST_DELAY = 0.02  # seconds between a call and the kill
SIGNAL_TO_KILL = 0.002  # seconds in which a process writes down where it is


def session(  # noqa: PLR0917 - arguments of a process
    name: str, rank: int, size: int, place: str, store: str, watched: str, events: Connection
) -> None:
    """One process of one session. Sends "entered" at each call of the function `watched`, and at the end how often
    each of `MOMENTS` was called, or a traceback."""
    os.chdir(place)
    trace = open(f"stack-{rank}", "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGUSR1, trace, all_threads=False)
    counts: Counter[str] = Counter()
    for moment, path in MOMENTS.items():
        _watch(path, moment, counts, events if moment == watched else None)
    try:
        import torch.distributed as dist

        import blocktrain as bt

        if size > 1:
            wait = timedelta(seconds=60)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait)
        run, overrides = CASES[name]
        if os.path.exists("run/run.json") and store.endswith("resume"):
            bt.resume("run")
        else:
            bt.run(bt.RunConfig.load("run.toml", (*RUNS[run].overrides, *overrides, SAVED)), "run")
        events.send(dict(counts))
    except BaseException:
        events.send(traceback.format_exc())


def _watch(path: str, moment: str, counts: Counter[str], events: Connection | None) -> None:
    owner = pkgutil.resolve_name(path.rpartition(".")[0])
    function = getattr(owner, path.rpartition(".")[2])

    def call(*args: Any, **keywords: Any) -> Any:
        counts[moment] += 1
        if events is not None:
            events.send("entered")
        return function(*args, **keywords)

    setattr(owner, path.rpartition(".")[2], call)


class Chain:
    """A run in a folder of its own, which is started, killed and resumed."""

    def __init__(self, name: str, place: Path):
        self.name, self.place, self.sessions = name, place, 0
        self.size = RUNS[CASES[name][0]].processes
        place.mkdir()
        os.chdir(place)
        write_data(Path())
        (place / "run.toml").write_text(file_of(CASES[name][0]))

    def start(self, watched: str = "") -> list[tuple[Any, Connection]]:
        """The processes of the next session, with what each sends."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOADED, "blocktrain"])
        self.sessions += 1
        kind = "resume" if (self.place / "run" / "run.json").exists() else "run"
        store, started = str(self.place / f"store-{self.sessions}-{kind}"), []
        for rank in range(self.size):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (self.name, rank, self.size, str(self.place), store, watched, sender)
            process = context.Process(target=session, args=arguments, daemon=True)
            process.start()
            sender.close()
            started.append((process, receiver))
        return started

    def newest(self) -> int:
        """The step of the newest checkpoint; -1 without one."""
        return max((step_of(path) for path in checkpoints(self.place / "run" / "checkpoints")), default=-1)

    def last_step(self) -> int:
        """The last step in the log."""
        log = self.place / "run" / "events.jsonl"
        lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
        return max((json.loads(line).get("step", 0) for line in lines), default=0)

    def session_steps(self) -> list[int]:
        """The step at which each session went on."""
        path = self.place / "run" / "run.json"
        return [item["step"] for item in json.loads(path.read_text())["sessions"]] if path.exists() else []

    def result(self) -> dict[str, Any]:
        """What must not depend on kills: every checkpoint's files, and the log but for what is measured and what the
        prefix cache did. Raises where a file is not what its checkpoint says."""
        found = recorded_folder(self.place / "run")
        for name, files in found["checkpoints"].items():
            for file, digest in files.items():
                data = (self.place / "run" / "checkpoints" / name / file).read_bytes()
                assert hashlib.sha256(data).hexdigest() == digest, f"{name}/{file}"
        events = [event for event in found["events"] if event["kind"] not in ("cache", "cached")]
        return {
            "checkpoints": found["checkpoints"],
            "events": [{key: value for key, value in event.items() if key != "flops"} for event in events],
        }


def ended(processes: list[tuple[Any, Connection]]) -> Any:
    """Wait for the end of an undisturbed session; returns the counts of the first process."""
    results = []
    for _, receiver in processes:
        message = "entered"
        while message == "entered":
            message = receiver.recv()
        if isinstance(message, str):
            raise RuntimeError(message)
        results.append(message)
    for process, _ in processes:
        process.join()
    return results[0]


def kill(chain: Chain, moment: str, count: int, delay: float, chance: random.Random) -> str | None:
    """Start a session and kill it `delay` seconds after the `count`-th call of the function of `moment` ("": after its
    start). Returns where it was; None if it came to its end before."""
    processes = chain.start(moment)
    seen, over = 0, None
    while moment and seen < count and over is None:
        message = processes[0][1].recv()
        seen, over = (seen + 1, None) if message == "entered" else (seen, message)
    if over is None:
        time.sleep(delay)
    alive = [process for process, _ in processes if process.is_alive()]
    if over is not None or len(alive) < chain.size:  # it was quicker
        for _, receiver in processes:
            while over is None or over == "entered":
                over = receiver.recv()
        for process in alive:
            process.join()
        if isinstance(over, str):
            raise RuntimeError(over)
        return None
    chance.shuffle(processes)
    for process, _ in processes:
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(SIGNAL_TO_KILL)
        os.kill(process.pid, signal.SIGKILL)
        time.sleep(chance.random() * LONGEST_DELAY)
    for process, _ in processes:
        process.join()
    return (chain.place / "stack-0").read_text()


def phase(stack: str) -> str:
    """The innermost of `MOMENTS` on a stack."""
    codes = {moment: inspect.unwrap(pkgutil.resolve_name(path)).__code__ for moment, path in MOMENTS.items()}
    for line in stack.splitlines():
        for moment, code in codes.items():
            if f'"{code.co_filename}"' in line and line.endswith(f" in {code.co_name}"):
                return moment
    for function, name in (("_train", "between steps"), ("opening", "counting"), ("_open", "counting")):
        if f" in {function}\n" in stack:
            return name
    return "elsewhere" if " in " in stack else "before or after the run"


def measure(name: str, kills: int, folder: Path, chance: random.Random) -> dict[str, Any]:
    """Kill runs of one case at least `kills` times, and see each to its end."""
    whole = Chain(name, folder / f"{name}-whole")
    started = time.monotonic()
    counts: dict[str, int] = ended(whole.start())
    seconds, expected = time.monotonic() - started, whole.result()
    found: dict[str, Any] = {"kills": 0, "chains": 0, "phases": Counter(), "most_steps_repeated": 0}
    found |= {"checkpoints_lost": 0, "differing_ends": 0, "errors": []}
    while found["kills"] < kills:
        found["chains"] += 1
        chain = Chain(name, folder / f"{name}-{found['chains']}")
        went_on, newest, last = 0, -1, 0
        try:
            while True:
                moment = chance.choice(["", *counts]) if found["kills"] < kills else ""
                count = chance.randint(1, min(counts.get(moment, 1), 12))
                delay = chance.random() * (LONGEST_DELAY if moment else seconds)
                stack = None
                if found["kills"] >= kills:
                    ended(chain.start())
                else:
                    stack = kill(chain, moment, count, delay, chance)
                for step in chain.session_steps()[went_on:]:
                    found["checkpoints_lost"] += step != max(0, newest)
                    found["most_steps_repeated"] = max(found["most_steps_repeated"], last - step)
                    went_on += 1
                found["checkpoints_lost"] += chain.newest() < newest
                newest, last = chain.newest(), chain.last_step()
                if stack is None:
                    break
                found["kills"] += 1
                found["phases"][phase(stack)] += 1
            if chain.result() != expected:
                found["differing_ends"] += 1
        except (RuntimeError, AssertionError, EOFError) as error:
            found["errors"].append(f"{type(error).__name__}: {error}"[-2000:])
            if len(found["errors"]) > 3:
                break
    return found


def main() -> None:
    """Measure, print a table and write the result."""
    from blocktrain.runtime import environment, pick_device, result_path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=140, help="in all; at least")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1, help="which of the runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--out", type=result_path, default=str(HERE / "kills.json"))
    options = parser.parse_args()

    out = options.out.resolve()
    names = [name for name, (run, _) in CASES.items() if RUNS[run].processes == options.processes]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        each, found = -(-options.kills // len(names)), {}
        print(
            "| run | kills | ends | differing | checkpoints lost | most steps repeated | during |\n" + "|---" * 7 + "|"
        )
        for name in names:
            case = found[name] = measure(name, each, folder, random.Random(f"{options.seed} {name}"))
            phases = ", ".join(f"{moment} {count}" for moment, count in case["phases"].most_common())
            numbers = [case[key] for key in ("kills", "chains", "differing_ends", "checkpoints_lost")]
            cells = [name, *numbers, case["most_steps_repeated"], phases]
            print("| " + " | ".join(map(str, cells)) + " |", *case["errors"], flush=True)
        os.chdir("/")
        total = Counter(sum((Counter(case["phases"]) for case in found.values()), Counter()))
        result = {
            "question": "what does SIGKILL at a random moment cost a run?",
            "checkpoint_interval_steps": INTERVAL,
            "kills": sum(case["kills"] for case in found.values()),
            "phases": dict(total.most_common()),
            "checkpoints_lost": sum(case["checkpoints_lost"] for case in found.values()),
            "differing_ends": sum(case["differing_ends"] for case in found.values()),
            "errors": sum(len(case["errors"]) for case in found.values()),
            "runs": found,
            "seed": options.seed,
            "environment": environment(pick_device("cpu")),
            "date": datetime.now(UTC).date().isoformat(),
        }
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

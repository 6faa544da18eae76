"""What does SIGKILL cost a run? Runs of all techniques are killed again and again at random moments and resumed.

    python benchmarks/endurance/kills.py --kills 140
    python benchmarks/endurance/kills.py --kills 70 --processes 2 --out benchmarks/endurance/kills-processes.json
    python benchmarks/endurance/kills.py --kills 70 --processes 2 --alone --out benchmarks/endurance/kills-alone.json

The runs are those of `tests/golden/runs.py`. Each is trained once undisturbed. Then it is trained in chains: killed,
resumed, killed, and so on until a session reaches the end. A process kills itself a random number of calls and returns
after it has entered a function out of `MOMENTS` for the n-th time, so kills fall between the system calls of functions
that last a millisecond; functions in which few kills fell are chosen more often. Or it is killed at a random time of
the whole session. Just before, it writes down where it is (`faulthandler`). Of a run in two processes both are killed,
one shortly after the other, as a job's manager does; with `--alone` the other one must end by itself.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any, TextIO

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
MOST_CALLS = 300  # calls and returns of functions between entering one of `MOMENTS` and the kill
LONGEST_DELAY = 0.02  # seconds between the kills of two processes
LONGEST_END = 120.0  # seconds in which a process must notice that the other one is gone
SIGNAL_TO_KILL = 0.002  # seconds in which a process writes down where it is


def session(  # noqa: PLR0917 - arguments of a process
    name: str, rank: int, size: int, place: str, store: str, fatal: tuple[str, int, int] | None, events: Connection
) -> None:
    """One process of one session. Sends at the end how often each of `MOMENTS` was called, or a traceback.

    fatal: one of `MOMENTS`, which of its calls, and how many calls and returns later the process kills itself.
    """
    os.chdir(place)
    trace = open(f"stack-{rank}", "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGUSR1, trace, all_threads=False)
    counts: Counter[str] = Counter()
    for moment, path in MOMENTS.items():
        die = Death(trace, fatal[2]) if fatal is not None and fatal[0] == moment else None
        _watch(path, moment, counts, fatal[1] if fatal is not None and die is not None else 0, die)
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


class Death:
    """A profiler that kills its process at the `left`-th call or return, after writing to `trace` where that was."""

    def __init__(self, trace: TextIO, left: int):
        self.trace, self.left = trace, left

    def __call__(self, *_: object) -> None:
        """One more call or return."""
        self.left -= 1
        if self.left <= 0:
            sys.setprofile(None)
            faulthandler.dump_traceback(self.trace, all_threads=False)
            os.kill(os.getpid(), signal.SIGKILL)


def _watch(path: str, moment: str, counts: Counter[str], fatal_call: int, die: Death | None) -> None:
    owner = pkgutil.resolve_name(path.rpartition(".")[0])
    function = getattr(owner, path.rpartition(".")[2])

    def call(*args: Any, **keywords: Any) -> Any:
        counts[moment] += 1
        if die is not None and counts[moment] == fatal_call:
            sys.setprofile(die)
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

    def start(self, fatal: tuple[str, int, int] | None = None, victim: int = 0) -> list[tuple[Any, Connection]]:
        """The processes of the next session, with what each sends; the one of rank `victim` has `fatal`."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOADED, "blocktrain"])
        self.sessions += 1
        kind = "resume" if (self.place / "run" / "run.json").exists() else "run"
        store, started = str(self.place / f"store-{self.sessions}-{kind}"), []
        for rank in range(self.size):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (self.name, rank, self.size, str(self.place), store, fatal if rank == victim else None, sender)
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
        message = receiver.recv()
        if isinstance(message, str):
            raise RuntimeError(message)
        results.append(message)
    for process, _ in processes:
        process.join()
    return results[0]


def kill(
    chain: Chain, fatal: tuple[str, int, int] | None, delay: float, chance: random.Random, alone: bool
) -> str | None:
    """Start a session and kill it, at `fatal` (see `session`) or, with None, `delay` seconds after its start. Returns
    where it was; None if it came to its end before.

    alone: kill one process of several, and raise `RuntimeError` unless the others end by themselves.
    """
    victim = chance.randrange(chain.size)
    processes = chain.start(fatal, victim)
    process, receiver = processes.pop(victim)
    message = None  # what the process sends before it can be killed
    with contextlib.suppress(EOFError):
        if fatal is not None or receiver.poll(delay):
            message = receiver.recv()
    if isinstance(message, str):
        raise RuntimeError(message)
    if message is not None:  # it was quicker
        for other, _ in processes:
            other.join()
        return None
    if fatal is None:
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(SIGNAL_TO_KILL)
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    for other, _ in processes:
        if alone:
            other.join(LONGEST_END)
        else:
            time.sleep(chance.random() * LONGEST_DELAY)
        if alone and other.is_alive():
            other.kill()
            raise RuntimeError("a process went on without the other one")
        other.kill()
        other.join()
    return (chain.place / f"stack-{victim}").read_text()


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


def measure(name: str, kills: int, folder: Path, chance: random.Random, alone: bool) -> dict[str, Any]:
    """Kill runs of one case at least `kills` times, and see each to its end."""
    whole = Chain(name, folder / f"{name}-whole")
    started = time.monotonic()
    counts: dict[str, int] = ended(whole.start())
    moments = ["any", *counts]
    seconds, expected = time.monotonic() - started, whole.result()
    found: dict[str, Any] = {"kills": 0, "chains": 0, "phases": Counter(), "most_steps_repeated": 0}
    found |= {"checkpoints_lost": 0, "differing_ends": 0, "errors": []}
    while found["kills"] < kills:
        found["chains"] += 1
        chain = Chain(name, folder / f"{name}-{found['chains']}")
        went_on, newest, last = 0, -1, 0
        try:
            while True:
                weights = [1 / (1 + found["phases"][moment]) ** 2 for moment in moments]
                (moment,) = chance.choices(moments, weights)
                calls = round(MOST_CALLS ** chance.random())
                fatal = (moment, chance.randint(1, min(counts[moment], 12)), calls) if moment in counts else None
                stack = None
                if found["kills"] >= kills:
                    ended(chain.start())
                else:
                    stack = kill(chain, fatal, chance.random() * seconds, chance, alone)
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
    parser.add_argument("--alone", action="store_true", help="kill one of two processes")
    parser.add_argument("--only", nargs="+", choices=CASES, help="these runs (default: all of so many processes)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--out", type=result_path, default=str(HERE / "kills.json"))
    options = parser.parse_args()

    out = options.out.resolve()
    names = [name for name, (run, _) in CASES.items() if RUNS[run].processes == options.processes]
    names = [name for name in names if name in (options.only or names)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        each, found = -(-options.kills // len(names)), {}
        print(
            "| run | kills | ends | differing | checkpoints lost | most steps repeated | during |\n" + "|---" * 7 + "|"
        )
        for name in names:
            chance = random.Random(f"{options.seed} {name}")
            case = found[name] = measure(name, each, folder, chance, options.alone)
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

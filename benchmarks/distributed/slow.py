"""Step time over a slow link: full data parallel, in blocks, and in blocks apart, two processes, interleaved.

    python benchmarks/distributed/slow.py [--mbit 1000] [--rounds 5] [--out benchmarks/distributed/slow.json]

As root on Linux: the two processes live in network namespaces of their own, joined by a pair of interfaces whose rate
`tc` limits (token buckets). One thread each. A round takes every method once; a ratio is taken in a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from steps import MODEL, Method, build, take_steps

from blocktrain.parallel.ranks import Ranks, open_ranks
from blocktrain.runtime import environment, pick_device, result_path

METHODS = (
    Method(name="full data parallel", blocks=1),
    Method(name="3 blocks", blocks=3),
    Method(name="3 blocks, sync_every = 8", blocks=3, apart=8),
)
SPACES, LINKS, HOSTS = ("bt-left", "bt-right"), ("btl0", "btl1"), ("10.77.0.1", "10.77.0.2")


def run(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def shaped_link(mbit: int) -> Iterator[None]:
    """Two namespaces and the link between them; gone afterwards."""
    try:
        for space in SPACES:
            run("ip", "netns", "add", space)
        run("ip", "link", "add", LINKS[0], "netns", SPACES[0], "type", "veth", "peer", LINKS[1], "netns", SPACES[1])
        for space, link, host in zip(SPACES, LINKS, HOSTS, strict=True):
            run("ip", "-n", space, "addr", "add", f"{host}/24", "dev", link)
            run("ip", "-n", space, "link", "set", link, "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("tc", "-n", space, "qdisc", "add", "dev", link, "root", "tbf", "rate", f"{mbit}mbit",
                "burst", "512kb", "latency", "50ms")  # fmt: skip
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False)


def work(rounds: int, out: Path) -> None:
    """One of the two processes; rank 0 writes what it saw."""
    torch.set_num_threads(1)
    with open_ranks("cpu") as ranks:
        built = {method.blocks: build(method.blocks) for method in METHODS}
        seen: dict[str, list[list[dict[str, float]]]] = {}
        for _ in range(rounds):
            for method in METHODS:
                seen.setdefault(method.name, []).append(take_steps(ranks, method, built[method.blocks]))
            for blocks, name in ((1, "full, no communication"), (3, "3 blocks, no communication")):
                alone = take_steps(Ranks(), Method(name=name, blocks=blocks), built[blocks])
                seen.setdefault(name, []).append(alone)
                ranks.barrier()
        if ranks.is_rank0:
            out.write_text(json.dumps(seen))


def table(seen: dict[str, list[list[dict[str, float]]]]) -> list[dict[str, Any]]:
    """A row a method: medians over the rounds of the mean over the blocks."""

    def means(name: str, kind: str) -> list[float]:
        return [statistics.mean(block[kind] for block in blocks) for blocks in seen[name]]

    full = means(METHODS[0].name, "seconds")
    return [
        {
            "method": name,
            "step_seconds": round(statistics.median(means(name, "seconds")), 4),
            "over_full_data_parallel": round(
                statistics.median(mine / theirs for mine, theirs in zip(means(name, "seconds"), full, strict=True)), 4
            ),
            "ratios": [round(mine / theirs, 3) for mine, theirs in zip(means(name, "seconds"), full, strict=True)],
            "megabytes_sent_by_a_process": round(statistics.median(means(name, "sent_bytes")) / 1e6, 3),
        }
        for name in seen
    ]


def measure(mbit: int, rounds: int, out: Path) -> dict[str, Any]:
    """The result as a JSON-able dictionary."""
    seen = out.with_suffix(".partial")
    with shaped_link(mbit):
        processes = []
        for rank, (space, link) in enumerate(zip(SPACES, LINKS, strict=True)):
            variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": HOSTS[0], "MASTER_PORT": 29517}
            variables |= {"GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": 1}
            mine = {**os.environ, **{key: str(value) for key, value in variables.items()}}
            words = [
                "ip",
                "netns",
                "exec",
                space,
                sys.executable,
                __file__,
                "--rounds",
                str(rounds),
                "--out",
                str(seen),
            ]
            processes.append(subprocess.Popen([*words, "--worker"], env=mine))
        if any([process.wait() for process in processes]):  # noqa: C419 - wait for both
            raise RuntimeError("a process failed; what it said is above")
    result = {
        "question": "step time over a slow link, two processes",
        "model": MODEL,
        "megabits_per_second": mbit,
        "rounds": rounds,
        "rows": table(json.loads(seen.read_text())),
        "load_average": os.getloadavg()[0],
        "environment": environment(pick_device("cpu")),
        "date": datetime.now(UTC).date().isoformat(),
    }
    seen.unlink()
    return result


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("slow.json")))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.rounds, options.out)
        return
    result = measure(options.mbit, options.rounds, options.out)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['model']}, {options.mbit} Mbit/s\n\n| method | step, s | over full data parallel | MB sent |")
    print("|---|---|---|---|")
    for row in result["rows"]:
        print(
            f"| {row['method']} | {row['step_seconds']:.3f} | {row['over_full_data_parallel']:.3f} | "
            f"{row['megabytes_sent_by_a_process']:.2f} |"
        )


if __name__ == "__main__":
    main()

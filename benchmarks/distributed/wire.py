"""How many bytes travel in a step of data parallel training, in full and in blocks?

    unshare --net python benchmarks/distributed/wire.py [--blocks 3] [--out benchmarks/distributed/wire.json]

Two counts: what is handed to the collectives by each process, and what the loopback interface carried between all of
them, headers and small talk included. The second needs a network namespace of its own (`unshare --net`, as root).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from steps import MODEL, Method, build, take_steps

from blocktrain.parallel.ranks import open_ranks
from blocktrain.runtime import environment, pick_device, result_path
from blocktrain.testing import run_distributed


def work(blocks: int) -> dict[str, list[dict[str, float]]]:
    """In each process: the steps of both methods."""
    with open_ranks() as ranks:
        full, parts = Method(name="full", blocks=1), Method(name="blocks", blocks=blocks)
        return {method.name: take_steps(ranks, method, build(method.blocks)) for method in (full, parts)}


def measure(blocks: int) -> dict[str, Any]:
    """The result as a JSON-able dictionary."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    rows = []
    for processes in (2, 4):
        told = run_distributed(work, processes, blocks)[0]
        for kind in ("payload_bytes", "sent_bytes"):
            (full,) = [round(step[kind]) for step in told["full"]]
            by_block = [round(step[kind]) for step in told["blocks"]]
            share = statistics.mean(by_block) / full
            rows.append(
                {
                    "processes": processes,
                    "count": kind,
                    "full": full,
                    "by_block": by_block,
                    "share_of_full": round(share, 5),
                    "share_times_blocks": round(share * blocks, 5),
                }
            )
    return {
        "question": "bytes of a data parallel step in blocks over those of a full one",
        "model": MODEL,
        "blocks": blocks,
        "rows": rows,
        "environment": environment(pick_device("cpu")),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("wire.json")))
    options = parser.parse_args()
    result = measure(options.blocks)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['model']}\n\n| processes | counted | full | in blocks, mean | of a full step's, times blocks |")
    print("|---|---|---|---|---|")
    for row in result["rows"]:
        mean = statistics.mean(row["by_block"])
        print(
            f"| {row['processes']} | {row['count']} | {row['full']:,} | {mean:,.0f} | {row['share_times_blocks']:.4f} |"
        )


if __name__ == "__main__":
    main()

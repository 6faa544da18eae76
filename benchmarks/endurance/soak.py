"""Does anything grow in a long run? Resident memory, open files, threads, disk and step time of a tiny run.

python benchmarks/endurance/soak.py [--visits 3000] [--set prefix.store=host ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flips import CONFIG

HERE = Path(__file__).resolve().parent
OVERRIDES = (
    "schedule.visit=1 steps",
    "evaluation.every=100 steps",
    "checkpoint.every=25 steps",
    "optimizer.state=disk",
)


def main() -> None:
    """Measure, print a table and write the result."""
    from blocktrain.runtime import environment, pick_device, result_path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visits", type=int, default=3000)
    parser.add_argument("--set", nargs="+", default=[], help="more overrides of the configuration")
    parser.add_argument("--out", type=result_path, default=str(HERE / "soak.json"))
    options = parser.parse_args()
    import blocktrain as bt
    from blocktrain.records.run_records import Record, VisitEnd

    out, rows, started = options.out.resolve(), list[dict[str, Any]](), time.perf_counter()
    every = options.visits // 10

    def note(record: Record) -> None:
        nonlocal started
        if not isinstance(record, VisitEnd) or (record.visit + 1) % every:
            return
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        files = [path for path in Path("run").rglob("*") if path.is_file()]
        row = {
            "visits": record.visit + 1,
            "resident_mib": round(int(status["VmRSS"].split()[0]) / 1024, 1),
            "python_blocks": sys.getallocatedblocks(),
            "open_files": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "files": len(files),
            "log_kib": round(Path("run/events.jsonl").stat().st_size / 1024),
            "other_kib": round(sum(path.stat().st_size for path in files if path.name != "events.jsonl") / 1024),
            "ms_per_visit": round((time.perf_counter() - started) * 1000 / every, 1),
        }
        rows.append(row)
        print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
        started = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("text.txt").write_text(Path(json.decoder.__file__).read_text())
        Path("run.toml").write_text(CONFIG)
        overrides = (*OVERRIDES, *options.set)
        config = bt.RunConfig.load("run.toml", (*overrides, f"schedule.sweeps={options.visits // 2}"))
        bt.run(config, "run", listeners=[note])
        os.chdir("/")
    result = {"question": "does anything grow in a long run?", "overrides": overrides, "intervals": rows}
    result |= {"date": datetime.now(UTC).date().isoformat(), "environment": environment(pick_device("cpu"))}
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

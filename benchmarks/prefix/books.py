"""Time to the same validation loss on a real corpus: uncached, cached, and full training.

    blocktrain compare benchmarks/prefix/books.toml --out runs/books --set text.source=DIR --set text.tokenizer=DIR
    python benchmarks/prefix/books.py runs/books/bcd runs/books/full [--out benchmarks/prefix/books.json]

The two runs give the validation curves; cached and uncached training have the same one, bit for bit. Step times are
measured here, interleaved in one process on the runs' own configurations: in each round one uncached, one cached and
one full step, through a whole sweep of short visits, so that cached steps include taking the rows to the next boundary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from blocktrain.report.multiplier import tokens_to_reach
from blocktrain.report.run import RunRecord
from blocktrain.runtime import environment, result_path
from blocktrain.train.blocks_train_module import BLOCKS
from blocktrain.train.config import RunConfig
from blocktrain.train.context import TrainingContext, build
from blocktrain.train.run_folder import RunFolder
from blocktrain.train.step import take_step
from blocktrain.train.technique import Position

STEPS_PER_VISIT = 12


def shortened(config: RunConfig, store: str, rows: int) -> RunConfig:
    """The same steps in visits of `STEPS_PER_VISIT`, with a cache in `store`."""
    share = (STEPS_PER_VISIT * config.batch.rows + 0.5) / rows
    sampling = replace(config.sampling, rate=share) if config.sampling.scope != "run" else config.sampling
    return replace(config, sampling=sampling, prefix=replace(config.prefix, store=store))


def step_times(bcd: RunConfig, full: RunConfig, folder: Path) -> dict[str, list[list[float]]]:
    """Seconds of each step by kind and block: {"uncached": [block][step], "cached": ..., "full": [[...]]}."""
    rows = len(build(full, folder).data.train)
    jobs: dict[str, TrainingContext] = {
        "uncached": build(shortened(bcd, "off", rows), folder),
        "cached": build(shortened(bcd, "host", rows), folder),
        "full": build(full, folder),
    }
    for name in jobs:
        (folder / name).mkdir()
    runs = {
        name: BLOCKS.prepare(context, BLOCKS.opening(context, BLOCKS.header(context, name), None), folder / name)
        for name, context in jobs.items()
    }
    times: dict[str, list[list[float]]] = {"uncached": [], "cached": [], "full": [[]]}
    visits = {name: list(context.schedule.visits(context.partition)) for name, context in jobs.items()}
    with ExitStack() as whole:
        whole.enter_context(runs["full"].module.visit(visits["full"][0], None))
        for block in range(len(jobs["cached"].partition)):
            with ExitStack() as stack:
                for name in ("uncached", "cached"):
                    visit, first = visits[name][block], block * STEPS_PER_VISIT
                    stack.enter_context(runs[name].module.visit(visit, None))
                    place = {"visit": visit.index, "sweep": visit.sweep, "block": visit.block.index, "step": first}
                    runs[name].techniques.open_visit(visit, Position(**place, tokens=0, seconds=0.0))
                    times[name].append([])
                for at in range(STEPS_PER_VISIT):
                    for name, run in runs.items():
                        visit = visits[name][0 if name == "full" else block]
                        step = block * STEPS_PER_VISIT + at
                        start = time.perf_counter()
                        take_step(run.context, run.module, run.techniques, visit, step=step, visit_step=at)
                        times[name][-1].append(time.perf_counter() - start)
    return times


def main() -> None:
    """Measure, print the table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bcd", type=Path)
    parser.add_argument("full", type=Path)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("books.json")))
    options = parser.parse_args()
    runs = {name: RunRecord.load(getattr(options, name)) for name in ("bcd", "full")}
    curves = {name: [(e.tokens, e.loss) for e in run.evaluations] for name, run in runs.items()}
    target = curves["bcd"][-1][1]
    per_step = runs["bcd"].header.tokens_per_step
    crossing = tokens_to_reach(target, curves["full"])
    with tempfile.TemporaryDirectory() as folder:
        times = step_times(RunFolder(options.bcd).config(), RunFolder(options.full).config(), Path(folder))
    medians = {name: [statistics.median(block) for block in blocks] for name, blocks in times.items()}
    blocks = [step.block for step in runs["bcd"].steps]
    seconds: dict[str, float | None] = {
        name: sum(medians[name][block] for block in blocks) for name in ("uncached", "cached")
    }
    seconds["full"] = None if crossing is None else crossing / per_step * medians["full"][0]
    steps = {"uncached": len(blocks), "cached": len(blocks), "full": None if crossing is None else crossing / per_step}
    result: dict[str, Any] = {
        "question": "time to block coordinate descent's final validation loss",
        "target_nats_per_token": target,
        "full_final_nats_per_token": curves["full"][-1][1],
        "steps": steps,
        "seconds": seconds,
        "step_seconds_median_by_block": medians,
        "flops_saved_share": 1 - runs["bcd"].flops_until(len(blocks)) / runs["bcd"].uncached_flops_until(len(blocks)),
        "configuration": "books.toml",
        "environment": environment(build(RunFolder(options.full).config(), Path()).device),
        "date": datetime.now(UTC).date().isoformat(),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"validation loss {target:.4f} nats per token (full training ended at {curves['full'][-1][1]:.4f})\n")
    print("| | steps | median step, s (by block) | time to that loss, s |")
    print("|---|---|---|---|")
    for name in ("uncached", "cached", "full"):
        told = ", ".join(f"{value:.3f}" for value in medians[name])
        count, total = steps[name], seconds[name]
        reached = "not reached | " if count is None or total is None else f"{count:.0f} | "
        print(f"| {name} | {reached}{told} | {'' if total is None else f'{total:.0f}'} |")


if __name__ == "__main__":
    main()

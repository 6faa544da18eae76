"""What each idea buys: tokens, counted FLOPs and tracked memory to full training's loss, with the same optimizer.

    python experiments/ablations/ablation.py --runs FOLDER [--size NAME] [--budget MINUTES] [--seeds N]
        [--methods NAMES] [--rounds N] [--write [FOLDER]]

Every method is trained at each of `RATES` with seed 0; its best rate is the one with the lowest last validation loss,
of those that were tried (the table says how many). Seeds 1 to N - 1 are then trained at the best rates. A run that is
finished is not taken again, one that was interrupted goes on; after `--budget` no new one begins. `--rounds` times the
steps of all methods in turns. `--write` puts what is there into the size's result file and its table of docs/LOG.md,
unless a method with a result has no finished run in FOLDER.

The B-F multiplier is the tokens that a method needs to the last validation loss of full training with the same seed
and optimizer (of the active block; a tail has its own rule), over full training's tokens; the crossing is
interpolated between evaluations. FLOPs "in all" are the whole run's, the others until the crossing: counted, of the
forward and backward passes (not of the optimizers: a Newton-Schulz update has products of its own); "cached" takes off
the forward pass of the frozen prefix, as if a cache of it filled itself. Time is the sum of a run's steps until the
crossing, each at the share of a full step that a step in its block takes: the median of interleaved rounds in one
process (stepping.py), no cache, layers left out where the visit leaves them out. Memory is that of weights,
gradients and moments, and the tracked peak of a step. All of these are shares of that full training's, as it was run
(not in the backward pass); where its loss is not reached, plain blocks' last loss is a nearer mark.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import blocktrain as bt
from blocktrain.records.log import read_events
from blocktrain.report.multiplier import tokens_to_reach
from blocktrain.report.run import RunRecord
from blocktrain.runtime import environment, result_path
from blocktrain.train.context import build
from blocktrain.train.techniques.growth import growing_visits

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ablations.cases import METHODS, MUON, SIZES, Size  # noqa: E402 - found beside this folder
from runner import folder_name  # noqa: E402 - found beside this folder
from stepping import interleaved, steps_of  # noqa: E402 - likewise
from tabling import put, spread  # noqa: E402 - likewise
from training import kept_bytes  # noqa: E402 - likewise

LOG = HERE.parents[1] / "docs" / "LOG.md"


def full_of(method: str) -> str:
    """Full training with a method's optimizer."""
    return "full, Muon" if set(MUON) <= set(METHODS[method]) else "full"


def folder_of(runs: Path, method: str, rate: float, seed: int) -> Path:
    """Where a run lies."""
    return runs / f"{folder_name(method)}-{rate:g}-seed{seed}"


def config_of(runs: Path, size: Size, method: str, rate: float, seed: int) -> bt.RunConfig:
    """What a run is asked for."""
    whole = [f"schedule.visit={size.steps} steps", f"stop.duration={size.steps} steps"]
    steps = whole if method == full_of(method) else [f"stop.duration={size.steps * 3 // 2} steps"]
    overrides = [
        *size.overrides,
        *steps,
        *METHODS[method],
        f"optimizer.lr={rate}",
        f"seed={seed}",
        f"text.cache={runs}",
    ]
    return bt.RunConfig.load(HERE / "ablation.toml", overrides)


def train(runs: Path, size: Size, method: str, rate: float, seed: int) -> None:
    """Take a run, or go on with it, unless it is finished."""
    folder = folder_of(runs, method, rate, seed)
    if not (folder / "run.json").exists():
        config = config_of(runs, size, method, rate, seed)
        bt.run(config, folder, method="full" if method == full_of(method) else "bcd")
    elif finished(runs, method, rate, seed) is None:
        bt.resume(folder)


def finished(runs: Path, method: str, rate: float, seed: int) -> RunRecord | None:
    """The record of a run that reached its end."""
    folder = folder_of(runs, method, rate, seed)
    log = folder / "events.jsonl"
    ended = log.exists() and any(event["kind"] == "end" for event in read_events(log))
    return RunRecord.load(folder) if ended else None


def last_loss(record: RunRecord) -> float:
    """Its last validation loss, nats per byte."""
    return record.evaluations[-1].loss


def search(runs: Path, size: Size, method: str) -> dict[float, float]:
    """Last loss of seed 0 by the rates that were tried to the end."""
    tried = {rate: finished(runs, method, rate, 0) for rate in size.rates}
    return {rate: last_loss(record) for rate, record in tried.items() if record is not None}


def best_rate(runs: Path, size: Size, method: str) -> float | None:
    """The rate with the lowest last loss; None until one was tried."""
    found = search(runs, size, method)
    return min(found, key=lambda rate: found[rate]) if found else None


def planned(runs: Path, size: Size, methods: list[str], seeds: int) -> Iterator[tuple[str, float, int]]:
    """The search first, then the further seeds at what it found."""
    for rate in size.rates:
        for method in methods:
            yield method, rate, 0
    for seed in range(1, seeds):
        for method in methods:
            rate = best_rate(runs, size, method)
            if rate is not None:
                yield method, rate, seed


def time_steps(runs: Path, size: Size, methods: Sequence[str], rounds: int) -> dict[str, Any]:
    """A step of each method in each of its blocks, in turns, beside a full step."""
    contenders = {}
    for method in dict.fromkeys(("full", *map(full_of, methods), *methods)):
        context = build(config_of(runs, size, method, size.rates[0], 0), runs / "timed")
        for index in context.visited_blocks:
            contenders[_step_name(method, index)] = steps_of(context, context.trained[index])
        for visit, layers in growing_visits(context):
            name = _step_name(method, visit.block.index, len(layers))
            contenders[name] = steps_of(context, visit.block, without=layers)
    for step in contenders.values():
        step()  # threads, allocator
    return interleaved(contenders, _step_name("full", 0), rounds=rounds)


def timed(runs: Path) -> dict[str, Any]:
    """What `time_steps` found; nothing where it was not asked."""
    path = runs / "steps.json"
    return json.loads(path.read_text()) if path.exists() else {"rounds": 0, "steps": {}}


def _step_name(method: str, block: int, left_out: int = 0) -> str:
    return f"{method}: block {block}" + f" with {left_out} layers left out" * bool(left_out)


def prefix_costs(folder: Path) -> list[float]:
    """FLOPs of the forward pass below each block, which a cache that fills itself saves."""
    cost = next(event for event in read_events(folder / "events.jsonl") if event["kind"] == "cost")["flops"]
    config = bt.RunConfig.from_mapping(json.loads((folder / "run.json").read_text())["config"])
    partition = build(config, folder).partition
    bottoms = [block.boundary for block in partition]
    return [sum(cost["forward_layers"][:bottom]) for bottom in bottoms]


def row(runs: Path, method: str, rate: float, seed: int, full_rate: float) -> dict[str, Any] | None:
    """One run beside full training of the same seed and optimizer; None where one of them is missing."""
    mine, full = finished(runs, method, rate, seed), finished(runs, full_of(method), full_rate, seed)
    if mine is None or full is None or mine.memory_peaks is None or full.memory_peaks is None:
        return None
    if mine.cost is None or full.cost is None:
        return None
    target = last_loss(full)
    tokens = tokens_to_reach(target, [(seen.tokens, seen.loss) for seen in mine.evaluations])
    costs: dict[str, float | None] = dict.fromkeys(("flops", "flops_cached", "time"))
    if tokens is not None:
        step, whole = tokens / mine.header.tokens_per_step, full.cost.flops.full * full.steps_done
        below = prefix_costs(folder_of(runs, method, rate, seed))
        costs["flops"] = mine.spent_until(step, mine.visit_flops) / whole
        cached = mine.spent_until(step, lambda visit: mine.visit_flops(visit) - below[visit.block])
        costs["flops_cached"] = cached / whole
        shares = {name: figures["ratio"] for name, figures in timed(runs)["steps"].items()}
        names = {visit: _step_name(method, visit.block, visit.left_out) for visit in mine.visits}
        beside = _step_name(full_of(method), 0)
        if {beside, *names.values()} <= shares.keys():
            took = mine.spent_until(step, lambda visit: shares[names[visit]])
            costs["time"] = took / (shares[beside] * full.steps_done)
    kept = [mine.cost.memory.full] if mine.is_full else mine.cost.memory.blocks
    peaks = [mine.memory_peaks.full] if mine.is_full else list(mine.memory_peaks.blocks)
    return {
        "method": method,
        "rate": rate,
        "seed": seed,
        "loss": last_loss(mine),
        "target": target,
        "tokens": mine.tokens,
        "flops_in_all": mine.flops_until(mine.steps_done) / full.flops_until(full.steps_done),
        "multiplier": None if tokens is None else tokens / full.tokens,
        **costs,
        "kept_bytes": [kept_bytes(parts) for parts in kept],
        "kept_bytes_full": kept_bytes(full.cost.memory.full),
        "peak_bytes": [sum(peak.parts.values()) for peak in peaks],
        "peak_bytes_full": sum(full.memory_peaks.full.parts.values()),
        "moments": [peak.parts["moments"] for peak in peaks],
        "moments_full": full.memory_peaks.full.parts["moments"],
        "losses": [[seen.tokens, round(seen.loss, 4)] for seen in mine.evaluations],
    }


def against_plain(rows: list[dict[str, Any]]) -> None:
    """Add to each row the tokens to plain blocks' last loss of the same seed, if known, over plain blocks' tokens."""
    plain = {item["seed"]: item for item in rows if item["method"] == "blocks, M=3"}
    for item in rows:
        if (other := plain.get(item["seed"])) is not None:
            tokens = tokens_to_reach(other["loss"], item["losses"])
            item["tokens_of_plain"] = None if tokens is None else tokens / other["tokens"]


def collected(runs: Path, size: Size, seeds: int) -> dict[str, Any]:
    """What was measured: the search, and each method at its best rate."""
    rates = {method: best_rate(runs, size, method) for method in METHODS}
    found = [
        row(runs, method, rate, seed, whole)
        for method, rate in rates.items()
        for seed in range(seeds)
        if rate is not None and (whole := rates[full_of(method)]) is not None
    ]
    rows = [item for item in found if item is not None]
    against_plain(rows)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": f"python experiments/ablations/ablation.py --runs RUNS --size {name_of(size)} --seeds {seeds}",
        "environment": environment(torch.device("cpu")),
        "search": {
            method: {f"{rate:g}": loss for rate, loss in search(runs, size, method).items()} for method in METHODS
        },
        "steps": timed(runs),
        "rows": rows,
    }


SHARES = ("flops_in_all", "multiplier", "flops", "flops_cached", "time", "tokens_of_plain")  # columns, in order


def table(result: dict[str, Any]) -> str:
    """The rows by method, averaged over its seeds."""
    lines = [
        "| method | rate, of how many tried | seeds | last loss | FLOPs in all | B-F multiplier | FLOPs, uncached "
        "| cached | time "
        "| tokens to plain blocks' last loss | weights, gradients, moments, worst visit | peak, worst visit "
        "| average visit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        rows = [item for item in result["rows"] if item["method"] == method]
        if not rows:
            continue
        peak = statistics.mean(max(item["peak_bytes"]) / item["peak_bytes_full"] for item in rows)
        mean = statistics.mean(statistics.mean(item["peak_bytes"]) / item["peak_bytes_full"] for item in rows)
        kept = statistics.mean(max(item["kept_bytes"]) / item["kept_bytes_full"] for item in rows)
        cells = [
            method,
            f"{rows[0]['rate']:g} of {len(result['search'][method])}",
            str(len(rows)),
            _each(rows, "loss", 3),
            *(_each(rows, key, 2) for key in SHARES),
            *(f"{share:.2f}" for share in (kept, peak, mean)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _each(rows: list[dict[str, Any]], key: str, digits: int) -> str:
    """The mean over seeds and, of several, the range; what was not reached says so."""
    if any(key not in item for item in rows):
        return "–"
    values = [item[key] for item in rows]
    if None in values:
        missed = None in (item["multiplier"] for item in rows) or key == "tokens_of_plain"
        return "not reached" if missed else "not timed"
    return spread(values, digits)


def name_of(size: Size) -> str:
    """As on the command line."""
    return next(name for name, known in SIZES.items() if known == size)


def write(result: dict[str, Any], size: Size, folder: Path = HERE) -> None:
    """The result file and, where it is this repository's, the table between the log's markers. Exits where that would
    take a method's rows away."""
    path = folder / size.result
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    lost = {item["method"] for item in known} - {item["method"] for item in result["rows"]}
    if lost:
        sys.exit(
            f"not written: no finished runs of {', '.join(sorted(lost))} beside full training's, and {path} has them"
        )
    path.write_text(json.dumps(result, indent=1) + "\n")
    if folder == HERE:
        put(LOG, size.writer, table(result))


def main() -> None:
    """Train what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--size", default="0.7M", choices=list(SIZES))
    parser.add_argument("--budget", type=float, default=float("inf"), help="minutes after which no run begins")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rounds", type=int, default=0, help="of timed steps, after the runs")
    parser.add_argument("--write", type=result_path, nargs="?", const=str(HERE), metavar="FOLDER", help="default: here")
    options = parser.parse_args()
    started, size = time.monotonic(), SIZES[options.size]
    for method, rate, seed in planned(options.runs, size, options.methods, options.seeds):
        if time.monotonic() - started > 60 * options.budget:
            break
        train(options.runs, size, method, rate, seed)
    if options.rounds:
        timing = time_steps(options.runs, size, options.methods, options.rounds)
        (options.runs / "steps.json").write_text(json.dumps(timing, indent=1) + "\n")
    result = collected(options.runs, size, options.seeds)
    print(json.dumps(result["search"], indent=1), table(result), sep="\n")
    if options.write:
        write(result, size, options.write)


if __name__ == "__main__":
    main()

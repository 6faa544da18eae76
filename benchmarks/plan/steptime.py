"""Does the planner's step time agree with a measured one, after `calibrate` on the same machine?

    python benchmarks/plan/steptime.py [--rounds 5] [--threads 2] [--out benchmarks/plan/steptime.json]

Each round calibrates as the command does, then takes full steps and steps in each of three blocks, for each of three
sizes of GPT-2, so that a noisy machine disturbs all of them; the error is taken within a round. Medians; fp32, fused
AdamW, no prefix cache; activating a block is not timed. A first round does not count, because a process that grows
pays once for each page of memory (here 1 s of a step's 3.4 s), which a run of hours does not notice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import blocktrain as bt
from blocktrain.plan.calibrate import measure
from blocktrain.plan.hardware import calibrated, load_hardware
from blocktrain.plan.layout import Layout
from blocktrain.plan.spec import from_config
from blocktrain.plan.step import Setting, step_time
from blocktrain.runtime import environment, pick_device, result_path, synchronize

SIZES = ((4, 256), (8, 384), (12, 512))  # layers, width
SEQ, ROWS, VOCABULARY, BLOCKS = 256, 4, 8192, 3
STEPS = 3  # of a visit, timed


def build(layers: int, width: int, blocks: int, device: torch.device) -> tuple[Any, bt.Partition, bt.BlockOptimizer]:
    """GPT-2 of a given size, cut into blocks, with its optimizer."""
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, n_positions=SEQ, vocab_size=VOCABULARY, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    partition = bt.partition(GPT2LMHeadModel(config).to(device), num_blocks=blocks)  # pyright: ignore[reportArgumentType]
    return config, partition, bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-4, fused=True)


def measured(partition: bt.Partition, optimizer: bt.BlockOptimizer, device: torch.device) -> float:
    """Seconds of a step, averaged over the blocks. For each block it is the median of a visit's steps after the first,
    which makes the moments."""
    tokens = torch.randint(0, VOCABULARY, (ROWS, SEQ), device=device)
    medians = []
    for block in partition:
        with optimizer.visit(block):
            seconds = [_step_seconds(partition, optimizer, tokens) for _ in range(1 + STEPS)]
        medians.append(statistics.median(seconds[1:]))
    return statistics.mean(medians)


def _step_seconds(partition: bt.Partition, optimizer: bt.BlockOptimizer, tokens: torch.Tensor) -> float:
    synchronize(tokens.device)
    start = time.perf_counter()
    partition.model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    synchronize(tokens.device)
    return time.perf_counter() - start


def compare(rounds: int) -> dict[str, Any]:
    """The result as a JSON-able dictionary."""
    device = pick_device()
    cases = []
    for layers, width in SIZES:
        for blocks in (1, BLOCKS):
            config, partition, optimizer = build(layers, width, blocks, device)
            spec = from_config(config.to_dict(), f"GPT-2 {layers} x {width}")
            cases.append((spec, blocks, partition, optimizer))
    for _, _, partition, optimizer in cases:
        measured(partition, optimizer, device)
    seen: list[list[tuple[float, float]]] = [[] for _ in cases]
    for _ in range(rounds):
        rates = calibrated(measure(device), load_hardware())
        for index, (spec, blocks, partition, optimizer) in enumerate(cases):
            layout = Layout(blocks=blocks, micro_rows=ROWS)
            planned = step_time(spec, layout, Setting(seq=SEQ, rows=ROWS, rates=rates)).seconds
            seen[index].append((planned, measured(partition, optimizer, device)))
    return {
        "question": "planned step time over measured step time, after calibrate",
        "rows": ROWS,
        "seq": SEQ,
        "vocabulary": VOCABULARY,
        "rounds": rounds,
        "cases": [_case(spec.name, blocks, pairs) for (spec, blocks, _, _), pairs in zip(cases, seen, strict=True)],
        "threads": torch.get_num_threads(),
        "environment": environment(device),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _case(name: str, blocks: int, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = sorted(planned / real for planned, real in pairs)
    return {
        "model": name,
        "blocks": blocks,
        "planned_seconds": round(statistics.median(planned for planned, _ in pairs), 5),
        "measured_seconds": round(statistics.median(real for _, real in pairs), 5),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def main() -> None:
    """Compare, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("steptime.json")))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = compare(options.rounds)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("| model | blocks | planned | measured | planned / measured |\n|---|---|---|---|---|")
    for case in result["cases"]:
        print(
            f"| {case['model']} | {case['blocks']} | {case['planned_seconds']:.3f} s "
            f"| {case['measured_seconds']:.3f} s | "
            f"{case['ratio']:.2f} ({case['ratios'][0]:.2f} to {case['ratios'][-1]:.2f}) |"
        )


if __name__ == "__main__":
    main()

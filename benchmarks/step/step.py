"""How long is a step in blocks, beside a step of full training? Interleaved in one process, medians and spread.

    python benchmarks/step/step.py [--blocks 3] [--rounds 15] [--out benchmarks/step/result.json]

Each round takes one full step and one step in each block, in that order, so that a noisy machine disturbs all alike; a
ratio is taken within a round. FLOPs are counted on the same shapes.
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
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import blocktrain as bt
from blocktrain.memory.flops import StepCounter
from blocktrain.runtime import environment, pick_device, result_path, synchronize

LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS, ROWS = 12, 512, 8, 8192, 256, 2


def build(num_blocks: int, device: torch.device) -> tuple[bt.Partition, bt.BlockOptimizer]:
    """GPT-2, 12 layers, 512 wide, with AdamW over `num_blocks` blocks."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=LAYERS,
            n_embd=WIDTH,
            n_head=HEADS,
            vocab_size=VOCABULARY,
            n_positions=TOKENS,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    partition = bt.partition(nn.Module.to(model, device), num_blocks=num_blocks)
    return partition, bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-4, fused=True)


def timed_step(
    partition: bt.Partition, optimizer: bt.BlockOptimizer, block: bt.Block, tokens: Tensor, device: torch.device
) -> float:
    """Seconds of forward, backward and update in a visit to `block`; activation is outside the clock, as it is paid
    once a visit. The first step of a visit, which allocates the moments, is taken before the clock starts."""
    with optimizer.visit(block):
        for warm in (True, False):
            synchronize(device)
            start = time.perf_counter()
            partition.model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            synchronize(device)
            if not warm:
                return time.perf_counter() - start
    raise AssertionError("unreachable")


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4)}


def measure(num_blocks: int, rounds: int) -> dict[str, Any]:
    """The result as a JSON-able dictionary."""
    device = pick_device()
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), device=device)
    full, full_optimizer = build(1, device)
    parts, optimizer = build(num_blocks, device)
    counter = StepCounter(parts.model.train(), {"input_ids": tokens, "labels": tokens})
    flops_full = counter.full()
    flops = [counter.training(block.parameters) / flops_full for block in parts]
    seconds_full: list[float] = []
    ratios: list[list[float]] = [[] for _ in parts]
    for _ in range(rounds):
        seconds_full.append(timed_step(full, full_optimizer, full[0], tokens, device))
        for block in parts:
            seconds = timed_step(parts, optimizer, block, tokens, device)
            ratios[block.index].append(seconds / seconds_full[-1])
    return {
        "question": "step time of each block over that of a full step",
        "model": f"GPT-2, {LAYERS} layers, width {WIDTH}, vocabulary {VOCABULARY}, {ROWS} x {TOKENS} tokens, fp32",
        "optimizer": "AdamW, fused",
        "rounds": rounds,
        "full_step_seconds": spread(seconds_full),
        "blocks": [
            {"block": index, "time_ratio": spread(values), "flops_ratio": round(flops[index], 4)}
            for index, values in enumerate(ratios)
        ],
        "average": {
            "time_ratio": spread([statistics.mean(row) for row in zip(*ratios, strict=True)]),
            "flops_ratio": round(statistics.mean(flops), 4),
        },
        "environment": environment(device),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("result.json")))
    options = parser.parse_args()
    result = measure(options.blocks, options.rounds)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['model']}; full step {result['full_step_seconds']['median']:.3f} s\n")
    print("| block | step time over full: median (quartiles) | counted FLOPs over full |")
    print("|---|---|---|")
    for row in (*result["blocks"], {"block": "average", **result["average"]}):
        time_ratio = row["time_ratio"]
        times = f"{time_ratio['median']:.3f} ({time_ratio['q1']:.3f} to {time_ratio['q3']:.3f})"
        print(f"| {row['block']} | {times} | {row['flops_ratio']:.3f} |")


if __name__ == "__main__":
    main()

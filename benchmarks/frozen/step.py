"""What does a step in blocks cost beside full training when frozen layers compute in int8?

    OMP_NUM_THREADS=1 python benchmarks/frozen/step.py [--layers 12] [--rounds 3] [--out benchmarks/frozen/step.json]

A model of Llama's shape, 1024 wide. Each round takes a full step in fp32, one in bf16 (weights and moments too), and
one step in each block of each division, exactly and in int8, uncached and from the hidden states below the block.
Processor seconds of one thread; ratios are taken within a round. Activating a block, quantizing and filling a cache are
outside the clock, as they are paid once a visit.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import blocktrain as bt
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.modules.int8_linear import FrozenCompute
from blocktrain.optim.precision import BF16_EXACT, FP32, Precision
from blocktrain.runtime import environment, result_path

WIDTH, VOCABULARY, ROWS = 1024, 4096, 4
ARMS: dict[str, tuple[Precision, FrozenCompute]] = {
    "fp32": (FP32, "exact"),
    "fp32, frozen int8": (FP32, "int8"),
    "bf16-exact, frozen int8": (BF16_EXACT, "int8"),
}


def build(layers: int) -> Any:
    """A model with random weights."""
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2816, "num_attention_heads": 16}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes))


def seconds(step: Callable[[], object]) -> float:
    """Processor seconds of a call."""
    start = time.process_time()
    step()
    return time.process_time() - start


def full_step(model: Any, tokens: Tensor) -> float:
    """Seconds of a step of full training with fused AdamW; the first, which allocates the moments, is not counted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(tokens: Tensor) -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(tokens[:, :16])
    return seconds(lambda: step(tokens))


def block_steps(model: Any, tokens: Tensor, num_blocks: int, arm: str) -> tuple[list[float], list[float]]:
    """Seconds of a step in each block: uncached, and from stored hidden states."""
    precision, frozen_compute = ARMS[arm]
    partition = bt.partition(model, num_blocks=num_blocks)
    options: dict[str, Any] = {"precision": precision, "frozen_compute": frozen_compute, "fused": True}
    optimizer = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-5, **options)
    runner, uncached, cached = BoundaryRunner(partition.chain), [], []

    def step(tokens: Tensor, start: int, hidden: Tensor | None) -> None:
        with runner.running(start=start, hidden=hidden):
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for block in partition:
        with optimizer.visit(block):
            step(tokens[:, :16], 0, None)
            uncached.append(seconds(lambda: step(tokens, 0, None)))
            if block.boundary < 2:  # nothing, or the embedding alone
                cached.append(uncached[-1])
                continue
            hidden = torch.randn(*tokens.shape, WIDTH).to(precision.compute)
            cached.append(seconds(lambda at=block.boundary, states=hidden: step(tokens, at, states)))
    optimizer.close()
    return uncached, cached


def spread(values: Sequence[float]) -> list[float]:
    """Median, smallest and largest."""
    return [round(number, 3) for number in (statistics.median(values), min(values), max(values))]


def main() -> None:
    """Measure, and write after each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 3, 6, 12])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("step.json")))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = build(arguments.layers)
    tokens = torch.randint(0, VOCABULARY, (ROWS, arguments.tokens // ROWS))
    full: dict[str, list[float]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    for done in range(1, arguments.rounds + 1):
        in_fp32, in_bf16 = (full_step(copy.deepcopy(model).to(d), tokens) for d in (torch.float32, torch.bfloat16))
        full["fp32"].append(in_fp32)
        full["bf16"].append(in_bf16)
        for num_blocks in arguments.blocks:
            for arm in ARMS:
                both = block_steps(copy.deepcopy(model), tokens, num_blocks, arm)
                for kind, of_blocks in zip(("uncached", "cached"), both, strict=True):
                    for base, of_full in (("fp32", in_fp32), ("bf16", in_bf16)):
                        mean = statistics.mean(of_blocks) / of_full
                        ratios[f"M = {num_blocks}, {arm}, {kind}, over full {base}"].append(mean)
        result = {
            "shape": {"layers": arguments.layers, "width": WIDTH, "tokens": arguments.tokens},
            "rounds": done,
            "full step, processor seconds (median, least, most)": {
                name: spread(values) for name, values in full.items()
            },
            "mean step over a sweep (median, least, most)": {name: spread(values) for name, values in ratios.items()},
            "environment": environment(torch.device("cpu")),
            "date": datetime.now(UTC).date().isoformat(),
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

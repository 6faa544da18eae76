"""What does a prefix cache save, and what does it cost? Counted FLOPs, wall clock, and the training curve.

    python benchmarks/prefix/prefix.py [--rounds 12] [--out benchmarks/prefix/result.json]

FLOPs are counted by PyTorch's counter around the steps and fills themselves, on real tensors. Wall clock is interleaved
in one process: each round takes full steps (the median of three) and a cached step in every block; a ratio is taken
within a round. Two first rounds are not counted: a process that grows pays for each page of memory once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import blocktrain as bt
from blocktrain.cache.encoding import Encoding
from blocktrain.cache.prefix_cache import PrefixCache
from blocktrain.cache.store import FileStore, MemoryStore, RowLayout, Store
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.chain.cost import LayerCost, layer_costs, theoretical_step_flops
from blocktrain.memory.flops import count_flops
from blocktrain.runtime import environment, pick_device, result_path, synchronize

LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS, ROWS, SLOTS = 12, 512, 8, 8192, 256, 2, 16
WARM_UP = 2  # rounds


def gpt2() -> nn.Module:
    """12 layers, 512 wide, 8k vocabulary: the model of the project's engine measurements."""
    torch.manual_seed(0)
    config = GPT2Config(
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
        tie_word_embeddings=False,
    )
    return GPT2LMHeadModel(config)


def by_layers(num_blocks: int) -> list[list[str]]:
    """Blocks of equally many transformer layers; the embedding with the first, the head with the last."""
    edges = [round(LAYERS * block / num_blocks) for block in range(num_blocks + 1)]
    groups = [[f"transformer.h.{i}" for i in range(a, b)] for a, b in itertools.pairwise(edges)]
    return [["embedding", *groups[0]], *groups[1:-1], [*groups[-1], "head"]]


class Bench:
    """A partitioned model, its optimizer, rows in slots, and a cache over them."""

    def __init__(self, num_blocks: int, make_store: Callable[[str, int, RowLayout], Store] | None = None):
        self.device = pick_device()
        model = gpt2().to(self.device)
        self.partition = bt.partition(model, patterns=by_layers(num_blocks) if num_blocks > 1 else [["*"]])
        self.optimizer = bt.BlockOptimizer(self.partition, torch.optim.AdamW, lr=1e-4, fused=True)
        self.tokens = torch.randint(0, VOCABULARY, (SLOTS, TOKENS), device=self.device)
        chain = self.partition.chain
        self.levels = [block.boundary for block in self.partition]
        self.costs = layer_costs(chain, self.batch(np.arange(ROWS)))
        self.cut = BoundaryRunner(chain)
        memory = lambda _name, slots, layout: MemoryStore(slots, layout, device=self.device)  # noqa: E731
        self.cache = PrefixCache(
            self.cut, num_slots=SLOTS, encoding=Encoding("compute"), make_store=make_store or memory
        )

    def batch(self, slots: np.ndarray) -> dict[str, Tensor]:
        """The model's arguments for some slots."""
        tokens = self.tokens[torch.from_numpy(slots).to(self.device)]
        return {"input_ids": tokens, "labels": tokens}

    def open(self, block: bt.Block) -> None:
        """Open the cache for a visit to `block`, where there is a prefix."""
        level = self.levels[block.index]
        if level:
            self.cache.open(level, key={"rows": "all"}, sample=self.batch(np.arange(1)))

    def step(self, block: bt.Block, slots: np.ndarray) -> None:
        """Forward and backward of one cached step, without the update."""
        batch, level = self.batch(slots), self.levels[block.index]
        hidden = self.cache.fetch(slots, batch) if level else None
        with self.cut.running(start=level, hidden=hidden):
            self.partition.model(**batch).loss.backward()


def closed_form(costs: tuple[LayerCost, ...], bench: Bench, block: bt.Block) -> int:
    """FLOPs of a cached step of `block`, forward from its first layer."""
    level = bench.levels[block.index]
    active = range(level, level + len(block.layers))
    return theoretical_step_flops(costs, active, first_layer=level)


def counted(num_blocks: int) -> dict[str, Any]:
    """FLOPs of a sweep with a cache, over those of full training on as many rows."""
    bench = Bench(num_blocks)
    whole = Bench(1)
    with whole.optimizer.visit(whole.partition[0]):
        full = count_flops(lambda: whole.step(whole.partition[0], np.arange(ROWS)))
    all_slots, reused, fills, forms = np.arange(SLOTS), [], [], []
    for block in bench.partition:
        with bench.optimizer.visit(block):
            bench.open(block)
            fill = 0
            if bench.levels[block.index]:
                for start in range(0, SLOTS, ROWS):
                    slots = all_slots[start : start + ROWS]
                    fill += count_flops(lambda slots=slots: bench.cache.fill(slots, bench.batch(slots)))
            fills.append(fill * ROWS // SLOTS)
            reused.append(count_flops(lambda block=block: bench.step(block, np.arange(ROWS))))
            bench.optimizer.zero_grad()
            forms.append(closed_form(bench.costs, bench, block))
    prefix = sum(cost.forward_flops for cost in bench.costs[: bench.levels[-1]])
    return {
        "blocks": num_blocks,
        "full_step_flops": full,
        "reuse_large": {"counted": sum(reused) / num_blocks / full, "closed_form": sum(forms) / num_blocks / full},
        "one_use_with_advance": {
            "counted": (sum(reused) + sum(fills)) / num_blocks / full,
            "closed_form": (sum(forms) + prefix) / num_blocks / full,
        },
        "pre_inference_of_a_sweep_over_one_forward": sum(fills) / sum(cost.forward_flops for cost in bench.costs),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 4), "q1": round(low, 4), "q3": round(high, 4)}


def wall_clock(rounds: int, folder: Path, flops: dict[str, Any]) -> dict[str, Any]:
    """Cached steps from a file store beside full steps, interleaved; and what reading costs."""
    bench = Bench(3, lambda name, slots, layout: FileStore(folder / name, slots, layout))
    whole = Bench(1)
    generator = np.random.default_rng(0)
    times: dict[str, list[float]] = {"full": [], "0": [], "1": [], "2": [], "read": [], "wait": []}

    def timed(name: str, action: Callable[[], object]) -> float:
        synchronize(bench.device)
        start = time.perf_counter()
        action()
        synchronize(bench.device)
        times[name].append(time.perf_counter() - start)
        return times[name][-1]

    def update(one: Bench, block: bt.Block, slots: np.ndarray) -> None:
        one.step(block, slots)
        one.optimizer.step()
        one.optimizer.zero_grad()

    ratios = []
    for at in range(WARM_UP + rounds):
        if at == WARM_UP:
            ratios.clear()
            for taken in times.values():
                taken.clear()
        with whole.optimizer.visit(whole.partition[0]):
            update(whole, whole.partition[0], np.arange(ROWS))  # allocates the moments
            full = statistics.median(
                timed("full", lambda: update(whole, whole.partition[0], np.arange(ROWS))) for _ in range(3)
            )
        row = []
        for block in bench.partition:
            with bench.optimizer.visit(block):
                bench.open(block)
                if bench.levels[block.index]:
                    bench.cache.fill(np.arange(SLOTS), bench.batch(np.arange(SLOTS)))
                first, second = (generator.permutation(SLOTS)[:ROWS] for _ in range(2))
                if bench.levels[block.index]:
                    timed("read", lambda slots=first: bench.cache.fetch(slots, bench.batch(slots)))
                update(bench, block, first)
                if bench.levels[block.index]:
                    bench.cache.prefetch(second)
                    time.sleep(0.02)  # as the step before would have given it
                waited = bench.cache.statistics.wait_seconds
                row.append(timed(str(block.index), lambda b=block, s=second: update(bench, b, s)) / full)
                if bench.levels[block.index]:
                    times["wait"].append(bench.cache.statistics.wait_seconds - waited)
        ratios.append(statistics.mean(row))
    bench.cache.close()
    step = statistics.mean(statistics.median(times[name]) for name in "012")
    expected = flops["reuse_large"]["counted"]
    return {
        "full_step_seconds": spread(times["full"]),
        "cached_step_over_full": spread(ratios),
        "flops_ratio": round(expected, 4),
        "over_flops_ratio": round(statistics.median(ratios) / expected, 4),
        "reading_from_file_over_step": round(statistics.median(times["read"]) / step, 5),
        "waiting_with_prefetch_over_step": round(statistics.median(times["wait"]) / step, 5),
    }


def same_curve(folder: Path) -> dict[str, Any]:
    """The trainer's losses with the cache off, in memory and in a file, over the same steps."""
    curves, seconds = {}, {}
    for store in ("off", "host", "file"):
        config = bt.RunConfig.from_mapping(
            {
                "name": store,
                "text": {"source": "stdlib", "row_tokens": 64, "max_documents": 40},
                "model": {
                    "architecture": "gpt2",
                    "config": {"n_layer": 6, "n_embd": 64, "n_head": 4, "n_positions": 64},
                },
                "sampling": {"scope": "sweep", "rate": 0.02},
                "schedule": {"visit": "3 epochs", "sweeps": 2},
                "prefix": {"store": store},
                "batch": {"rows": 4},
                "optimizer": {"lr": 1e-3, "state": "host"},
                "evaluation": {"rows": 16},
            }
        )
        run = bt.run(config, folder / store)
        events = [json.loads(line) for line in run.events.read_text().splitlines()]
        curves[store] = [event["loss"] for event in events if event["kind"] == "step"]
        seconds[store] = events[-1]["seconds"]
    return {
        "steps": len(curves["off"]),
        "bitwise_equal": curves["off"] == curves["host"] == curves["file"],
        "dropout_in_active_block": 0.1,
    }


def main() -> None:
    """Measure, print tables and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("result.json")))
    options = parser.parse_args()
    flops = [counted(3), counted(8)]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        clock = wall_clock(options.rounds, Path(folder) / "store", flops[0])
        curve = same_curve(Path(folder))
    result = {
        "model": f"GPT-2, {LAYERS} layers, width {WIDTH}, vocabulary {VOCABULARY} untied, {ROWS} x {TOKENS} tokens",
        "flops": flops,
        "wall_clock": clock,
        "curve": curve,
        "environment": environment(pick_device()),
        "date": datetime.now(UTC).date().isoformat(),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['model']}\n")
    print(
        "| blocks | reuse large: counted (closed form) | one use, advance: counted (closed form) | fills of a sweep |"
    )
    print("|---|---|---|---|")
    for row in flops:
        large, once = row["reuse_large"], row["one_use_with_advance"]
        print(
            f"| {row['blocks']} | {large['counted']:.4f} ({large['closed_form']:.4f}) | {once['counted']:.4f} "
            f"({once['closed_form']:.4f}) | {row['pre_inference_of_a_sweep_over_one_forward']:.3f} forward passes |"
        )
    print(f"\n{json.dumps(clock, indent=1)}\n{json.dumps(curve, indent=1)}")


if __name__ == "__main__":
    main()

"""What does each layout of a model over processes send, and how evenly is it shared? Counted, not timed.

    python benchmarks/distributed/layouts.py [--processes 2] [--out benchmarks/distributed/layouts.json]

Bytes are those that a process hands to gloo to be sent: hidden states and their gradients in a pipeline; of a gathering
its own part, to each of the others; of a sum of gradients in parts, each other's part, to it. Balance is the largest
process's work in a step over the mean, by counted forward FLOPs of each layer.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steps import MODEL, TOKENS, VOCABULARY, build
from torch import Tensor

import blocktrain as bt
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.chain.cost import layer_costs
from blocktrain.parallel.config import PipelineConfig, ShardingConfig
from blocktrain.parallel.fsdp import ShardedPartition
from blocktrain.parallel.pipeline import Pipeline
from blocktrain.parallel.ranks import Ranks, open_ranks
from blocktrain.parallel.stages import visit_costs
from blocktrain.runtime import environment, result_path
from blocktrain.testing import run_distributed

BLOCKS, MICRO = 3, 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "contiguous blocks, 1f1b": (1, {}),
    "contiguous blocks, 1f1b, stored prefix": (1, {"start": "boundary"}),
    "a piece of each block, 1f1b": (0, {}),
    "contiguous blocks, interleaved": (1, {"schedule": "interleaved"}),
}
sent: Counter[str] = Counter()


def counting() -> None:
    """Note what is handed to gloo from here on."""
    size, send, made = dist.get_world_size(), dist.isend, dist.P2POp.__init__
    gather, reduce = dist.all_gather_single, dist.reduce_scatter_single

    def init(self: Any, op: Any, tensor: Tensor, peer: int | None = None, *args: Any, **keywords: Any) -> None:
        made(self, op, tensor, peer, *args, **keywords)
        if op is send:
            sent[f"to process {self.peer}"] += tensor.nbytes

    def counted_gather(output: Tensor, *args: Any, **keywords: Any) -> Any:
        sent["weights"] += output.nbytes // size * (size - 1)
        return gather(output, *args, **keywords)

    def counted_reduce(*args: Any, **keywords: Any) -> Any:
        sent["gradients"] += (keywords["input"] if "input" in keywords else args[1]).nbytes // size * (size - 1)
        return reduce(*args, **keywords)

    dist.P2POp.__init__, dist.all_gather_single, dist.reduce_scatter_single = init, counted_gather, counted_reduce


def micro_batches() -> list[dict[str, Tensor]]:
    """Rows of one step."""
    rows = torch.randint(VOCABULARY, (MICRO, 1, TOKENS), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def pipelined(ranks: Ranks, stages: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A step in each block's visit."""
    model = build(BLOCKS)[0].model
    partition = bt.partition(model, num_blocks=BLOCKS, stages=stages or ranks.size)
    costs = [cost.forward_flops for cost in layer_costs(partition.chain, micro_batches()[0])]
    pipeline = Pipeline(ranks, partition, PipelineConfig(**settings), costs=costs)
    optimizer = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-4)
    cut, found = BoundaryRunner(partition.chain), []
    for block in partition:
        level = pipeline.stages[block.index][0].start
        hidden = [cut.states(batch, [level])[level] for batch in micro_batches()] if level else None
        with optimizer.visit(pipeline.local_block(block)), pipeline.visit(optimizer.active_block):
            sent.clear()
            pipeline.backward(micro_batches(), weights=[1 / MICRO] * MICRO, hidden=hidden)
            in_step = dict(sent)
            optimizer.step()
            optimizer.zero_grad()
        prices = visit_costs(block, costs)
        mine = sum(prices[layer] for run in pipeline.local_stages(block).values() for layer in run)
        trained = pipeline.local_block(block).num_parameters
        found.append({"sent": in_step, "work": mine, "trained": trained, "block": block.num_parameters})
    return found


def sharded(ranks: Ranks) -> list[dict[str, Any]]:
    """A step in each block's visit, one micro-batch a process."""
    parts = ShardedPartition(ranks, build(BLOCKS)[0], ShardingConfig()).partition
    optimizer, batch, found = bt.BlockOptimizer(parts, torch.optim.AdamW, lr=1e-4), micro_batches()[ranks.rank], []
    for block in parts:
        with optimizer.visit(block):
            sent.clear()
            (parts.model(**batch).loss / ranks.size).backward()
            in_step = dict(sent)
            optimizer.step()
            optimizer.zero_grad()
        found.append({"sent": in_step, "work": 1.0, "trained": block.num_parameters, "block": block.num_parameters})
    return found


def measure() -> dict[str, Any]:
    """Layout -> blocks, on one process."""
    with open_ranks() as ranks:
        counting()
        found = {name: pipelined(ranks, *layout) for name, layout in LAYOUTS.items()}
        return {**found, "sharded": sharded(ranks)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("layouts.json")))
    options = parser.parse_args()
    by_rank = run_distributed(measure, options.processes, timeout_seconds=900, patience_seconds=3600)
    layouts: dict[str, Any] = {}
    for name in by_rank[0]:
        blocks = []
        for told in zip(*(found[name] for found in by_rank), strict=True):
            work = [each["work"] for each in told]
            blocks.append(
                {
                    "sent_by_process": [each["sent"] for each in told],
                    "balance": round(max(work) * len(work) / sum(work), 3),
                    "trained_by_process": [each["trained"] for each in told],
                    "block_parameters": told[0]["block"],
                }
            )
            print(f"{name:40} balance {blocks[-1]['balance']:.2f} {blocks[-1]['sent_by_process']}")
        layouts[name] = blocks
    told = {
        "question": "bytes that a process hands over in a step, by layout and block; how evenly work is shared",
        "model": f"{MODEL.split(', 1 x')[0]}, {MICRO} micro-batches of 1 x {TOKENS} tokens, fp32, AdamW",
        "processes": options.processes,
        "date": datetime.now(UTC).date().isoformat(),
        "environment": environment(torch.device("cpu")),
        "layouts": layouts,
    }
    options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

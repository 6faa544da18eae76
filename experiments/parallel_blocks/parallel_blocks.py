"""What if processes train different blocks at once? The paper's open question, at a size for a laptop.

    python experiments/parallel_blocks/parallel_blocks.py [--steps 450] [--seeds 1] [--write [FILE]]

    sequential   | block 0 | block 1 | block 2 | block 0 ...     one process
    at once      | block 0 | block 0 ...                         process 0     all start a visit from the same weights;
                 | block 1 | block 1 ...                         process 1     at its end each sends its block to the
                 | block 2 | block 2 ...                         process 2     others: a weight crosses once per visit
    together     | block 0 | block 1 | block 2 | block 0 ...     three processes, one step of three times the rows

All see the same rows and take the same number of steps in sum ("together": a third, each of three times the rows), so
they compute the same; "at once" and "together" take a third of the time. The model is trained from scratch on bytes
of Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import blocktrain as bt
from blocktrain.data.stdlib import stdlib_files
from blocktrain.runtime import environment
from blocktrain.testing import run_distributed

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tabling import add_write, put  # noqa: E402 - found beside this folder

BLOCKS, LAYERS, WIDTH, TOKENS, ROWS, RATE = 3, 4, 96, 64, 8, 1e-3
EVALUATIONS, VALIDATION_ROWS = 9, 64


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to use three processes; `visit` is its own steps in a visit."""

    name: str
    visit: int
    processes: int = 1
    rows: int = ROWS


METHODS = [
    Method(name="sequential", visit=50),
    Method(name="at once, exchange each 50 steps", visit=50, processes=BLOCKS),
    Method(name="at once, exchange each 10 steps", visit=10, processes=BLOCKS),
    Method(name="together", visit=50, rows=BLOCKS * ROWS),
]


def build(seed: int) -> tuple[bt.Partition, bt.BlockOptimizer]:
    """A byte-level decoder of half a million parameters in three blocks, moments kept."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
    )
    partition = bt.partition(LlamaForCausalLM(config), num_blocks=BLOCKS)
    return partition, bt.BlockOptimizer(partition, torch.optim.AdamW, lr=RATE, state=bt.KeepOnHost())


def corpus(split: str) -> Tensor:
    """All bytes of a split."""
    files = stdlib_files()["train" if split == "train" else "validation"]
    return torch.frombuffer(bytearray(b"".join(file.path.read_bytes() for file in files)), dtype=torch.uint8)


def rows_of(text: Tensor, count: int, *seed: int) -> Tensor:
    """(count, TOKENS) bytes at random places."""
    generator = torch.Generator().manual_seed(hash(seed))
    starts = torch.randint(len(text) - TOKENS, (count,), generator=generator)
    return torch.stack([text[start : start + TOKENS] for start in starts.tolist()]).long()


@torch.no_grad()
def validation_loss(partition: bt.Partition, rows: Tensor) -> float:
    """Nats per byte."""
    partition.model.eval()
    return float(partition.model(input_ids=rows, labels=rows).loss)


def train(mapping: dict[str, Any], steps: int, seed: int) -> list[tuple[int, float]]:
    """(steps of `ROWS` rows taken by all, validation loss), on the first process."""
    method = Method(**mapping)
    partition, optimizer = build(seed)
    text, rank = corpus("train"), dist.get_rank()
    validation = rows_of(corpus("validation"), VALIDATION_ROWS, 0)
    a_visit = method.visit * method.processes * method.rows // ROWS  # in steps of ROWS rows
    curve, done = [(0, validation_loss(partition, validation))], 0
    while done < steps:
        number = done // a_visit
        block = partition[rank if method.processes > 1 else number % BLOCKS]
        with optimizer.visit(block):
            for step in range(method.visit):
                first = done + (rank * method.visit + step) * method.rows // ROWS
                rows = torch.cat([rows_of(text, ROWS, seed, at) for at in range(first, first + method.rows // ROWS)])
                partition.model(input_ids=rows, labels=rows).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        if method.processes > 1:
            for trained in partition:
                for parameter in trained.parameters.values():
                    dist.broadcast(parameter.data, src=trained.index)
        done += a_visit
        if done * EVALUATIONS // steps > (done - a_visit) * EVALUATIONS // steps and rank == 0:
            curve.append((done, validation_loss(partition, validation)))
    return curve


def table(results: dict[str, list[list[tuple[int, float]]]], steps: int) -> str:
    """Losses at thirds of the run, mean over seeds, and their range at its end."""
    marks = [steps // 3, 2 * steps // 3, steps]
    lines = [f"| | {' | '.join(f'{mark} steps' for mark in marks)} | range at the end |", "|---|---|---|---|---|"]
    for name, curves in results.items():
        at = [[next(loss for step, loss in curve if step >= mark) for curve in curves] for mark in marks]
        means = " | ".join(f"{sum(losses) / len(losses):.3f}" for losses in at)
        lines.append(f"| {name} | {means} | {min(at[-1]):.3f} to {max(at[-1]):.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all methods; print, and with `--write` keep, the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=450, help="of 8 rows, taken by all processes in sum")
    parser.add_argument("--seeds", type=int, default=1)
    add_write(parser, HERE / "result.json")
    options = parser.parse_args()
    results: dict[str, list[list[tuple[int, float]]]] = {}
    for seed in range(options.seeds):
        for method in METHODS:
            told = run_distributed(
                train,
                method.processes,
                asdict(method),
                options.steps,
                seed,
                timeout_seconds=1800,
                patience_seconds=7200,
            )
            results.setdefault(method.name, []).append(told[0])
            print(seed, method.name, told[0][-1], flush=True)
    print(table(results, options.steps))
    if options.write:
        found = {
            "date": datetime.now(UTC).date().isoformat(),
            "environment": environment(torch.device("cpu")),
            "steps": options.steps,
        }
        options.write.write_text(json.dumps({**found, "curves": results}, indent=1) + "\n")
        if options.write.parent == HERE:
            put(HERE / "README.md", "parallel_blocks.py", table(results, options.steps))


if __name__ == "__main__":
    main()

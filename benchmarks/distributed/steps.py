"""The model and the steps that `wire.py` and `slow.py` look at: a GPT-2, in full, in blocks, and in blocks apart."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import blocktrain as bt
from blocktrain.parallel.config import DistributedConfig
from blocktrain.parallel.ranks import Ranks
from blocktrain.train.blocks_train_module import data_parallel

LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS = 6, 384, 6, 4096, 256
MODEL = f"GPT-2, {LAYERS} layers, width {WIDTH}, vocabulary {VOCABULARY}, 1 x {TOKENS} tokens a process, fp32, AdamW"


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a step is taken."""

    name: str
    blocks: int
    apart: int | None = None  # steps between averagings


def build(blocks: int) -> tuple[bt.Partition, bt.BlockOptimizer]:
    """The model in `blocks` blocks."""
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
    )
    partition = bt.partition(GPT2LMHeadModel(config), num_blocks=blocks)
    return partition, bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-4, fused=True)


def sent_bytes() -> int:
    """What this process's network namespace has sent so far, over all its interfaces, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def take_steps(ranks: Ranks, method: Method, built: tuple[bt.Partition, bt.BlockOptimizer]) -> list[dict[str, float]]:
    """A visit to every block; for each, seconds, payload and sent bytes of a step (the mean of `apart` steps)."""
    partition, optimizer = built
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS))
    together = data_parallel(ranks, DistributedConfig(sync_every=method.apart))
    count = method.apart or 1
    found = []

    def step(number: int, rows: Tensor) -> None:
        with together.gradient_sync():
            (partition.model(input_ids=rows, labels=rows).loss / ranks.size).backward()
        optimizer.step()
        optimizer.zero_grad()
        together.after_step(number)

    for block in partition:
        with optimizer.visit(block), together.visit(optimizer.active_block):
            step(count - 1, tokens)  # allocates the moments
            ranks.barrier()
            payload, sent, start = ranks.all_reduced_bytes, sent_bytes(), time.perf_counter()
            for number in range(count):
                step(number, tokens)
            ranks.barrier()
            found.append(
                {
                    "seconds": (time.perf_counter() - start) / count,
                    "payload_bytes": (ranks.all_reduced_bytes - payload) / count,
                    "sent_bytes": (sent_bytes() - sent) / count,
                }
            )
    return found

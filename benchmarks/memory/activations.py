"""What do checkpointing and a chunked loss save of activations, and what do they cost in FLOPs?

    python benchmarks/memory/activations.py [--out benchmarks/memory/activations.json]

Bytes that autograd keeps for the backward pass and FLOPs of a step, counted on a copy without memory, for each active
block. `docs/memory.md` shows the table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import blocktrain as bt
from blocktrain.chain.freezing import activate, release
from blocktrain.memory.flops import StepCost, StepCounter
from blocktrain.runtime import environment, pick_device, result_path
from blocktrain.train.config import MemoryConfig
from blocktrain.train.techniques.memory_saving import saving_memory

LAYERS, WIDTH, HEADS, ROWS, TOKENS, CHUNK, BLOCKS = 12, 512, 8, 8, 256, 256, 3
COMMON = {"vocab_size": 8192, "use_cache": False, "attn_implementation": "sdpa"}
WAYS = {
    "plain": MemoryConfig(),
    "layers": MemoryConfig(checkpointing="layers"),
    "chunks": MemoryConfig(loss_chunk=CHUNK),
    "both": MemoryConfig(checkpointing="layers", loss_chunk=CHUNK),
    "both, boundaries on the host": MemoryConfig(checkpointing="layers", loss_chunk=CHUNK, boundaries="host"),
}


def gpt2() -> nn.Module:
    settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    shape = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": TOKENS}
    return GPT2LMHeadModel(GPT2Config(**shape, **settings, **COMMON))


def llama(**others: Any) -> nn.Module:
    shape = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 1376}
    return LlamaForCausalLM(LlamaConfig(**shape, **(COMMON | others)))


MODELS: dict[str, tuple[Callable[[], nn.Module], range]] = {  # blocks counted
    "GPT-2, vocabulary 8k": (gpt2, range(BLOCKS)),
    "Llama, vocabulary 8k": (llama, range(BLOCKS)),
    "Llama, vocabulary 128k": (lambda: llama(vocab_size=131072), range(1)),
}


def counted(build: Callable[[], nn.Module], index: int, saving: MemoryConfig) -> StepCost:
    """A step's forward and backward pass in a visit to block `index`."""
    with torch.device("meta"):
        model = build().train()
    partition = bt.partition(model, num_blocks=BLOCKS)
    tokens = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    block = partition[index]
    activate(partition, block, frozen_dropout=False)
    with saving_memory(partition, saving):
        counter = StepCounter(model, {"input_ids": tokens, "labels": tokens})
    release(partition)
    return counter.measure(set(block.parameters))


def measure() -> list[dict[str, Any]]:
    """A row for each model and block."""
    rows = []
    for name, (build, blocks) in MODELS.items():
        for index in blocks:
            steps = {way: counted(build, index, saving) for way, saving in WAYS.items()}
            mib = {way: round(step.saved_bytes / 2**20) for way, step in steps.items()}
            flops = {way: round(step.flops / steps["plain"].flops, 3) for way, step in steps.items()}
            rows.append({"model": name, "block": index, "saved_mib": mib, "flops_over_plain": flops})
    return rows


def main() -> None:
    """Count, print the table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("activations.json")))
    options = parser.parse_args()
    result = {
        "question": "MiB saved for the backward pass, and FLOPs over those without",
        "shape": f"{LAYERS} layers, {WIDTH} wide, {HEADS} heads, fp32, {ROWS} x {TOKENS} tokens, M = {BLOCKS}",
        "rows": measure(),
        "environment": environment(pick_device("cpu")),
        "date": datetime.now(UTC).date().isoformat(),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"| model, active block | {' | '.join(WAYS)} | FLOPs, layers |\n{'|---' * (len(WAYS) + 2)}|")
    for row in result["rows"]:
        saved = " | ".join(str(mib) for mib in row["saved_mib"].values())
        print(f"| {row['model']}, {row['block']} | {saved} | {row['flops_over_plain']['layers']:.3f} |")


if __name__ == "__main__":
    main()

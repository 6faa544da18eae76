"""Peak memory of a whole sweep at full size, on tensors without memory: what the package's own code would hold.

    python benchmarks/memory/memory.py [--only llama-2-7b ...] [--out benchmarks/memory/result.json]

Each configuration is a model that is never allocated, cut into blocks and trained by `BlockOptimizer`;
`blocktrain.train.accounting` tells the worst moment of each visit, by part. Checkpointing of layers, a loss in chunks
and precisions are taken where this version has them; what it does not have is left out and named.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import blocktrain as bt
from blocktrain.model.fake import fake_copy
from blocktrain.model.tracker import Peak
from blocktrain.optim.precision import PRESETS
from blocktrain.runtime import environment, pick_device
from blocktrain.train.accounting import StepShape, predicted_peaks

GIB = 2**30
TOKENS = 1024
CHUNK = 128  # tokens of the loss at a time, where the package can do that

LLAMA = {"max_position_embeddings": 4096, "attn_implementation": "sdpa", "tie_word_embeddings": False}
GPT2 = {"n_positions": TOKENS, "vocab_size": 50257, "attn_implementation": "sdpa", "resid_pdrop": 0.0}


def llama(layers: int, width: int, inner: int, *, heads: int, kv: int, vocabulary: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            vocab_size=vocabulary,
            **LLAMA,
        )
    )


def gpt2(layers: int, width: int, heads: int) -> GPT2LMHeadModel:
    settings = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, **GPT2}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=heads, **settings))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama-2-7b": lambda: llama(32, 4096, 11008, heads=32, kv=32, vocabulary=32000),
    "llama-3-8b": lambda: llama(32, 4096, 14336, heads=32, kv=8, vocabulary=128256),
    "G-1.6B": lambda: gpt2(30, 2048, 16),
    "G-5.4B": lambda: gpt2(28, 3968, 32),
    "G-10B": lambda: gpt2(56, 3968, 32),
    "G-20B": lambda: gpt2(110, 3968, 32),
}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One row of the table. target_gib: what is aimed at; of the G models, the paper's Table 4 `Mem`, which holds
    weights, gradients and moments alone: so few tokens that activations are nothing show just these."""

    model: str
    precision: str
    target_gib: float
    cut: dict[str, Any]
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"fused": True})
    checkpointed: bool = True
    tokens: int = TOKENS


FINE = {"largest": 70_000_000}  # attention, and the MLP's matrices, apart
CONFIGURATIONS = (
    Configuration(model="llama-2-7b", precision="bf16-exact", target_gib=15.5, cut={"num_blocks": 34}),
    Configuration(model="llama-2-7b", precision="bf16-exact", target_gib=15.5, cut=FINE),
    Configuration(
        model="llama-2-7b", precision="bf16-exact", target_gib=14.6, cut=FINE, optimizer=torch.optim.Muon, options={}
    ),
    Configuration(model="llama-2-7b", precision="int8", target_gib=9.5, cut=FINE),
    Configuration(model="llama-2-7b", precision="nf4", target_gib=6.5, cut=FINE),
    Configuration(model="llama-3-8b", precision="bf16-exact", target_gib=18.5, cut=FINE),
    *(
        Configuration(model=name, precision="fp32", target_gib=gib, cut={"num_blocks": 3}, checkpointed=False, tokens=8)
        for name, gib in (("G-1.6B", 12.038), ("G-5.4B", 40.942), ("G-10B", 80.370), ("G-20B", 156.402))
    ),
)


def missing(configuration: Configuration) -> str | None:
    """Why this version cannot run a configuration, None where it can."""
    if configuration.precision not in PRESETS:
        return f"precision '{configuration.precision}' is not in this version"
    return None


@contextmanager
def saving(configuration: Configuration, partition: bt.Partition) -> Iterator[list[str]]:
    """Layers checkpointed and the loss in chunks, as far as this version has them; yields what is on."""
    on: list[str] = []
    with ExitStack() as stack:
        for name, arguments in (("checkpointing", (partition,)), ("chunked_loss", (partition.model, CHUNK))):
            if configuration.checkpointed and hasattr(bt, name):
                stack.enter_context(getattr(bt, name)(*arguments))
                on.append(name)
        yield on


def without_memory(model: str) -> nn.Module:
    """The model's shapes, as fake tensors of the CPU."""
    with torch.device("meta"):
        built = MODELS[model]()
    return fake_copy(built).model.train()


def measure(configuration: Configuration) -> dict[str, Any]:
    """One row: peaks of every visit, the worst in parts."""
    started = time.perf_counter()
    model = without_memory(configuration.model)
    partition = bt.partition(model, **configuration.cut)
    optimizer = bt.BlockOptimizer(
        partition, configuration.optimizer, lr=1e-4, precision=PRESETS[configuration.precision], **configuration.options
    )
    tokens = torch.zeros(1, configuration.tokens, dtype=torch.long)
    step = StepShape(loss=lambda model: model(input_ids=tokens, labels=tokens).loss, inputs=[tokens])
    with saving(configuration, partition) as on:
        peaks = predicted_peaks(optimizer, step)
    worst = max(range(len(peaks)), key=lambda index: peaks[index].bytes)
    peak = peaks[worst]
    return {
        "model": configuration.model,
        "precision": configuration.precision,
        "optimizer": configuration.optimizer.__name__,
        "cut": configuration.cut,
        "tokens": configuration.tokens,
        "saving": on,
        "parameters": partition.num_parameters,
        "blocks": len(partition),
        "law_gib": round(law(partition, configuration), 3),
        "peak_gib": round(peak.bytes / GIB, 3),
        "mean_gib": round(sum(peak.bytes for peak in peaks) / len(peaks) / GIB, 3),
        "target_gib": configuration.target_gib,
        "worst_block": repr(partition[worst]),
        "worst_operation": peak.operation,
        "parts_gib": in_gib(peak),
        "host_gib": round(peak.host_bytes / GIB, 3),
        "peaks_gib": [round(peak.bytes / GIB, 3) for peak in peaks],
        "seconds": round(time.perf_counter() - started, 1),
    }


def law(partition: bt.Partition, configuration: Configuration) -> float:
    """Weights, and gradients and moments of the largest block, by arithmetic (GiB): for fp32 Adam and M equal blocks
    4 + 12/M bytes a parameter, the paper's `Mem`."""
    largest = max(block.num_parameters for block in partition)
    scale = {"fp32": (4, 12), "bf16-exact": (2, 16)}.get(configuration.precision, (0, 0))
    return (scale[0] * partition.num_parameters + scale[1] * largest) / GIB


def in_gib(peak: Peak) -> dict[str, float]:
    return {part: round(count / GIB, 3) for part, count in peak.parts.items()}


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="MODEL", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    print("| model | precision | optimizer | blocks | peak GiB | mean of blocks | target | worst | parts, GiB |")
    print("|---" * 9 + "|")
    for configuration in CONFIGURATIONS:
        reason = missing(configuration)
        if configuration.model not in options.only:
            continue
        if reason is not None:
            left_out.append(f"{configuration.model}: {reason}")
            continue
        row = measure(configuration)
        rows.append(row)
        parts = ", ".join(f"{part} {gib:.2f}" for part, gib in row["parts_gib"].items() if gib >= 0.005)
        print(
            f"| {row['model']} | {row['precision']} | {row['optimizer']} | {row['blocks']} | "
            f"{row['peak_gib']:.2f} | {row['mean_gib']:.2f} | "
            f"{row['target_gib']} | {row['worst_operation']} | {parts} |",
            flush=True,
        )
    result = {
        "question": "peak device memory of a sweep, 1 x 1024 tokens, everything trained",
        "rows": rows,
        "left_out": left_out,
        "environment": environment(pick_device("cpu")),
        "date": datetime.now(UTC).date().isoformat(),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

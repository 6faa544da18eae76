"""Peak memory of a whole sweep at full size, on tensors without memory: what the package's own code would hold.

    python benchmarks/memory/memory.py [--only llama-2-7b ...] [--again] [--out benchmarks/memory/result.json]

Each configuration is a model that is never allocated, cut into blocks and trained by `BlockOptimizer`;
`blocktrain.train.predict_memory` tells the worst moment of each visit, by part. A row is stored when it is done, and a
configuration that has one is not measured again unless told to.

A GPU beside its host is measured on tensors of a CPU, where device and host are one memory. So weights that come from
the host are copied (`AlwaysCopying`), as on a GPU, and what stays on the host is known by its label.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import blocktrain as bt
from blocktrain.memory.fake import FakeCopy, fake_copy
from blocktrain.memory.tracker import Peak
from blocktrain.optim.factory import MetaScalarsReadAsOne
from blocktrain.optim.precision import Moments, preset
from blocktrain.runtime import AlwaysCopying, environment, pick_device, result_path, source_commit
from blocktrain.train.config import MemoryConfig
from blocktrain.train.predict_memory import StepShape, peaks_of_all
from blocktrain.train.techniques.memory_saving import saving_memory

GIB = 2**30
TOKENS = 1024
CHUNK = 128  # tokens of the loss at a time

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
    "llama-3-70b": lambda: llama(80, 8192, 28672, heads=64, kv=8, vocabulary=128256),
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
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)
    moments: Moments = "fp32"
    memory: MemoryConfig = MemoryConfig(checkpointing="layers", loss_chunk=CHUNK)  # noqa: RUF009 - a value
    tokens: int = TOKENS

    def named(self) -> dict[str, Any]:
        """What tells this row from the others."""
        return json.loads(json.dumps(asdict(self)))


FINE = {"largest": 70_000_000}  # attention, and the MLP's matrices, apart
FUSED = {"fused": True}
STREAMED = MemoryConfig(checkpointing="layers", loss_chunk=CHUNK, frozen="host")
PLAIN = MemoryConfig()


def llama_2(precision: str, target_gib: float, **others: Any) -> Configuration:
    settings = {"cut": FINE, "options": FUSED, **others}
    return Configuration(model="llama-2-7b", precision=precision, target_gib=target_gib, **settings)


CONFIGURATIONS = (
    llama_2("bf16-exact", 100.41, cut={"num_blocks": 1}),  # full training: 16 bytes a parameter
    llama_2("bf16-exact", 15.5, cut={"num_blocks": 34}),
    llama_2("bf16-exact", 15.5),
    llama_2("bf16-exact", 14.6, moments="8bit", options={}),
    llama_2("bf16-exact", 14.6, optimizer="Muon", options={}),
    llama_2("int8", 9.5),
    llama_2("nf4", 6.5),
    llama_2("bf16-exact", 4.5, memory=STREAMED),
    llama_2("nf4", 4.5, memory=STREAMED),
    Configuration(model="llama-3-8b", precision="bf16-exact", target_gib=18.5, cut=FINE, options=FUSED),
    Configuration(
        model="llama-3-8b", precision="bf16-exact", target_gib=18.5, cut={"largest": 40_000_000}, options=FUSED
    ),
    *(
        Configuration(
            model="llama-3-70b",
            precision=precision,
            target_gib=round(24e9 / GIB, 2),
            cut={"largest": 240_000_000},
            options=FUSED,
            memory=STREAMED,
        )
        for precision in ("bf16-exact", "nf4")
    ),
    *(
        Configuration(
            model=name,
            precision="fp32",
            target_gib=gib,
            cut=cut,
            options=FUSED,
            memory=PLAIN,
            tokens=8,
        )
        for name, gib in (("G-1.6B", 12.038), ("G-5.4B", 40.942), ("G-10B", 80.370), ("G-20B", 156.402))
        for cut in ({"num_blocks": 3}, {"num_blocks": 3, "pieces": "modules"})
    ),
)


def without_memory(model: str, precision: str) -> FakeCopy:
    """The model's shapes, as fake tensors of the CPU, stored as checkpoints are: in bf16, for the paper in fp32."""
    with torch.device("meta"):
        built = MODELS[model]()
    return fake_copy((built if precision == "fp32" else built.bfloat16()).train())


def peaks_of(configuration: Configuration, fake: FakeCopy) -> tuple[bt.Partition, list[Peak]]:
    """Of a visit to each block; of blocks that are alike the lowest and the highest are visited (`predicted_peaks` does
    the same on a copy of its own)."""
    partition = bt.partition(fake.model, **configuration.cut)
    tokens = torch.zeros(1, configuration.tokens, dtype=torch.long)
    step = StepShape(
        loss=lambda model: model(input_ids=tokens, labels=tokens).loss,
        inputs=[tokens],
        saving=lambda copy: saving_memory(copy, configuration.memory),
    )
    with fake.running(), MetaScalarsReadAsOne():
        optimizer = bt.BlockOptimizer(
            partition,
            getattr(torch.optim, configuration.optimizer),
            lr=1e-4,
            precision=replace(preset(configuration.precision), moments=configuration.moments),
            frozen=bt.OnHost(side_stream=AlwaysCopying) if configuration.memory.frozen == "host" else bt.OnDevice(),
            **configuration.options,
        )
        return partition, peaks_of_all(optimizer, step, blocks=partition)


def measure(configuration: Configuration) -> dict[str, Any]:
    """One row: peaks of every visit, the worst in parts."""
    started = time.perf_counter()
    partition, peaks = peaks_of(configuration, without_memory(configuration.model, configuration.precision))
    worst = max(range(len(peaks)), key=lambda index: peaks[index].bytes)
    peak = peaks[worst]
    return {
        **configuration.named(),
        "parameters": partition.num_parameters,
        "blocks": len(partition),
        "law_gib": round(law(partition, configuration), 3),
        "peak_gib": round(peak.bytes / GIB, 3),
        "mean_gib": round(sum(peak.bytes for peak in peaks) / len(peaks) / GIB, 3),
        "worst_block": repr(partition[worst]),
        "worst_operation": peak.operation,
        "parts_gib": in_gib(peak),
        "host_gib": round(peak.host_bytes / GIB, 3),
        "peaks_gib": [round(peak.bytes / GIB, 3) for peak in peaks],
        "seconds": round(time.perf_counter() - started, 1),
        "commit": source_commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def law(partition: bt.Partition, configuration: Configuration) -> float:
    """Weights, and gradients and moments of the largest block, by arithmetic (GiB): for fp32 Adam and M equal blocks
    4 + 12/M bytes a parameter, the paper's `Mem`."""
    largest = max(block.num_parameters for block in partition)
    scale = {"fp32": (4, 12), "bf16-exact": (2, 16)}.get(configuration.precision, (0, 0))
    return (scale[0] * partition.num_parameters + scale[1] * largest) / GIB


def in_gib(peak: Peak) -> dict[str, float]:
    return {part: round(count / GIB, 3) for part, count in peak.parts.items()}


def told(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    parts = ", ".join(f"{part} {gib:.2f}" for part, gib in row["parts_gib"].items() if gib >= 0.005)
    moments = "" if row["moments"] == "fp32" else f" {row['moments']}"
    return (
        f"| {row['model']} | {row['precision']}, {row['memory']['frozen']} | {row['optimizer']}{moments} | "
        f"{row['blocks']} | {row['peak_gib']:.2f} | {row['mean_gib']:.2f} | {row['target_gib']} | "
        f"{row['worst_block']} | {row['worst_operation']} | {parts} | {row['seconds']} |"
    )


def main() -> None:
    """Measure what has not been measured, print a table, and write the result after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="MODEL", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--again", action="store_true", help="measure rows that are there already, too")
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("result.json")))
    options = parser.parse_args()
    known = json.loads(options.out.read_text())["rows"] if options.out.is_file() else []
    rows: list[dict[str, Any]] = []
    print(
        "| model | precision, frozen on | optimizer | blocks | peak GiB | mean | target | worst | at | parts, GiB | s |"
    )
    print("|---" * 11 + "|")
    for configuration in CONFIGURATIONS:
        name = configuration.named()
        row = next((row for row in known if {key: row.get(key) for key in name} == name), None)
        if configuration.model in options.only and (row is None or options.again):
            row = measure(configuration)
        if row is not None:
            rows.append(row)
            print(told(row), flush=True)
            write(options.out, rows)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    result = {
        "question": "peak device memory of a sweep, 1 x 1024 tokens, everything trained",
        "rows": rows,
        "environment": environment(pick_device("cpu")),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

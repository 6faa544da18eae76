"""What fits a 24 GB card, and how fast: full AdamW, AdamW offloaded to the host, BAdam, and blocks, in one run.

    python benchmarks/memory/gpu.py [--sizes 1b 7b 13b] [--cap-gb 24] [--out benchmarks/memory/gpu.json]
    python benchmarks/memory/gpu.py --self-check          the smallest model through every method, on the CPU

Needs a CUDA device with at least the cap free, 13 B x 12 bytes (156 GB) of host memory for the offloaded masters and
moments at 13b, and PyTorch for CUDA; --self-check needs neither, and proves the code paths only, not a figure.

Llama shapes with random weights, 1 x 1024 tokens, bf16. The process is held to the cap by
`torch.cuda.set_per_process_memory_fraction`; a method that does not fit says so in its row and the next one goes on.
Peak is `torch.cuda.max_memory_allocated`. Share of the matrix product rate: counted FLOPs of a step over its time,
beside what a large bf16 product reaches here. BAdam is measured where its package is installed (`pip install badam`).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import blocktrain as bt
from blocktrain.memory.flops import count_flops
from blocktrain.runtime import (
    environment,
    is_out_of_memory,
    peak_memory_bytes,
    reset_peak_memory,
    result_path,
    synchronize,
)

TOKENS = 1024
CHUNK = 128
# layers, width, inner width, heads, vocabulary
SIZES = {
    "self-check": (2, 64, 128, 4, 256),
    "1b": (16, 2048, 5632, 16, 32000),
    "7b": (32, 4096, 11008, 32, 32000),
    "13b": (40, 5120, 13824, 40, 32000),
}

Step = Callable[[], None]  # what each method's context hands out: the call to be timed


def build(size: str, device: torch.device) -> nn.Module:
    """Random bf16 weights, made on the device."""
    layers, width, inner, heads, vocabulary = SIZES[size]
    settings: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": torch.bfloat16}
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        **settings,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # in fp32 a 7B model would not fit the cap before it is converted
    try:
        with torch.device(device):
            return nn.Module.to(LlamaForCausalLM(config), torch.bfloat16).train()
    finally:
        torch.set_default_dtype(before)


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@contextmanager
def full_adamw(model: nn.Module, tokens: Tensor) -> Iterator[Step]:
    """Weights, gradients and moments on the device, all bf16; Hugging Face's activation checkpointing."""
    checkpointed(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    yield step


@contextmanager
def offloaded_adamw(model: nn.Module, tokens: Tensor) -> Iterator[Step]:
    """fp32 masters and moments on the host; gradients go there as they are made, weights come back after the step."""
    checkpointed(model)
    pinned = tokens.device.type == "cuda"
    masters: dict[Any, Tensor] = {
        p: torch.empty(p.shape, dtype=torch.float32, pin_memory=pinned).copy_(p.detach()) for p in model.parameters()
    }
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-4, fused=True)

    def to_host(parameter: Tensor) -> None:
        assert parameter.grad is not None
        masters[parameter].grad = parameter.grad.to("cpu", torch.float32)
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(to_host) for parameter in model.parameters()]

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master, non_blocking=True)

    yield step
    for hook in hooks:
        hook.remove()


@contextmanager
def badam(model: nn.Module, tokens: Tensor) -> Iterator[Step]:
    """Luo et al. 2024, their own package: one transformer layer at a time, fp32 copy of the active one."""
    from badam import BlockOptimizer  # pyright: ignore[reportMissingImports]

    checkpointed(model)
    model.enable_input_require_grads()  # pyright: ignore[reportCallIssue]
    optimizer = BlockOptimizer(
        base_optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        named_parameters_list=list(model.named_parameters()),
        block_prefix_list=None,
        switch_block_every=2,
        verbose=0,
    )

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    yield step


@contextmanager
def blocks(model: nn.Module, tokens: Tensor) -> Iterator[Step]:
    """This package, bf16-exact, a layer a block: a call is two steps in the next block, the visit's costs included."""
    partition = bt.partition(model, num_blocks=len(model.model.layers) + 2)  # pyright: ignore
    optimizer = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-4, fused=True, precision=bt.BF16_EXACT)
    turn = iter(range(10**9))
    with bt.checkpointing(partition), bt.chunked_loss(model, CHUNK):

        def step() -> None:
            with optimizer.visit(partition[next(turn) % len(partition)]):
                for _ in range(2):
                    model(input_ids=tokens, labels=tokens).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()

        yield step


METHODS: dict[str, tuple[Any, int]] = {  # what to run, and how many optimizer steps a call takes
    "full AdamW": (full_adamw, 1),
    "offloaded AdamW": (offloaded_adamw, 1),
    "BAdam": (badam, 1),
    "blocks": (blocks, 2),
}


def measure(size: str, name: str, device: torch.device, calls: int) -> dict[str, Any]:
    """One row; `fits` is False where the cap was reached."""
    method, steps = METHODS[name]
    row: dict[str, Any] = {"size": size, "method": name}
    if name == "BAdam" and importlib.util.find_spec("badam") is None:
        return {**row, "left_out": "package badam is not installed"}
    try:
        model = build(size, device)
        reset_peak_memory(device)
        tokens = torch.randint(0, model.config.vocab_size, (1, TOKENS), device=device)  # pyright: ignore
        with method(model, tokens) as step:
            step()
            seconds = []
            for _ in range(max(calls, 2)):
                synchronize(device)
                start = time.perf_counter()
                step()
                synchronize(device)
                seconds.append((time.perf_counter() - start) / steps)
            flops = count_flops(step) / steps
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {**row, "fits": False}
    median = statistics.median(seconds)
    return {
        **row,
        "fits": True,
        "peak_bytes": peak_memory_bytes(device),
        "step_seconds": round(median, 4),
        "tokens_per_second": round(TOKENS / median, 1),
        "flops_per_second": flops / median,
    }


def matmul_rate(device: torch.device) -> float:
    """FLOPs per second of a large bf16 matrix product, the best of five."""
    size = 256 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    times = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        torch.mm(a, a)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def main() -> None:
    """Measure every method at every size, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES], default=["1b", "7b", "13b"])
    parser.add_argument("--cap-gb", type=float, default=24.0)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--self-check", action="store_true", help="the smallest model on the CPU; nothing is written")
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("gpu.json")))
    options = parser.parse_args()
    if not options.self_check and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --self-check runs the smallest model on the CPU")
    device = torch.device("cpu" if options.self_check else "cuda")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap_gb * 1e9 / total))
    rate = matmul_rate(device)
    rows: list[dict[str, Any]] = []
    print("| size | method | peak GiB | tokens/s | share of the matrix product rate |\n|---|---|---|---|---|")
    for size in ["self-check"] if options.self_check else options.sizes:
        for name in METHODS:
            row = measure(size, name, device, options.calls)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            rows.append(row)
            told = row.get("left_out", f"does not fit {options.cap_gb:g} GB")
            if row.get("fits"):
                row["share_of_matmul_rate"] = round(row["flops_per_second"] / rate, 3)
                told = f"{row['peak_bytes'] / 2**30:.2f} | {row['tokens_per_second']} | {row['share_of_matmul_rate']}"
            print(f"| {size} | {name} | {told} |", flush=True)
    result = {
        "question": "peak and speed of full training, offloading, BAdam and blocks under one cap",
        "cap_gb": options.cap_gb,
        "matmul_flops_per_second": rate,
        "rows": rows,
        "environment": environment(device),
        "date": datetime.now(UTC).date().isoformat(),
    }
    if not options.self_check:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

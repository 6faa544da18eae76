"""Step times as interleaved ratios: each round takes one step of every contender, so that a busy machine disturbs all
alike; a ratio is taken within a round, and the median of the rounds is reported. On one thread of a CPU seconds are
the processor's own, which stand still while others have it.

A contender returns the seconds of one step (of each of its blocks: their mean).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from runner import Figures
from torch import nn

import blocktrain as bt
from blocktrain.chain.block import Block
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.chain.chain import Layer
from blocktrain.compare.adapter import Adapter
from blocktrain.compare.external_module import ExternalModule
from blocktrain.compare.external_setup import external_context
from blocktrain.errors import ConfigError
from blocktrain.plan.presets import find_model
from blocktrain.runtime import is_out_of_memory, peak_memory_bytes, reset_peak_memory, synchronize
from blocktrain.train.config import RunConfig
from blocktrain.train.context import TrainingContext
from blocktrain.train.step import take_step
from blocktrain.train.technique import Techniques
from blocktrain.train.techniques.growth import running_without
from blocktrain.train.verify_plan import meta_model

Contender = Callable[[], float]


def interleaved(contenders: Mapping[str, Contender], base: str | None, *, rounds: int) -> Figures:
    """Milliseconds of each, and its ratio to `base`; a contender that runs out of memory drops out."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    lost: list[str] = []
    for _ in range(rounds):
        for name, step in contenders.items():
            if name in lost:
                continue
            try:
                seconds[name].append(step())
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                lost.append(name)
                torch.cuda.empty_cache()
    figures: Figures = {}
    for name, spent in seconds.items():
        if name in lost:
            figures[name] = {"ms": None, "ratio": None, "reason": "out of memory"}
            continue
        ratios = None
        if base is not None and base not in lost:
            ratios = sorted(mine / full for mine, full in zip(spent, seconds[base], strict=True))
        figures[name] = {
            "ms": 1000 * statistics.median(spent),
            "ratio": None if ratios is None else statistics.median(ratios),
            "quartiles": None if ratios is None else [ratios[len(ratios) // 4], ratios[-(-3 * len(ratios) // 4) - 1]],
        }
    return {"rounds": rounds, "steps": figures}


def timed(device: torch.device, step: Callable[[], Any]) -> float:
    """Seconds of `step`, the device's own work included."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    synchronize(device)
    start = clock()
    step()
    synchronize(device)
    return clock() - start


def steps_of(context: TrainingContext, block: Block, *, level: int = 0, without: Collection[Layer] = ()) -> Contender:
    """A step of ours in a visit to `block`; the first one of a visit, which makes the moments, is not timed.

    level: where stored hidden states come in; they lie in memory, and are not copied. without: layers left out.
    """
    batch = {
        key: value.to(context.device)
        for key, value in context.data.train.batch(range(context.config.batch.rows)).items()
    }
    cut = BoundaryRunner(context.partition.chain)
    hidden = None
    if level:
        cut.check(batch, level)
        hidden = cut.states(batch, [level])[level]

    def step() -> None:
        stored = nullcontext() if hidden is None else cut.running(start=level, hidden=hidden)
        with stored, running_without(context, without):
            context.model(**batch).loss.backward()
        context.optimizer.clip_grad_norm(context.config.optimizer.max_grad_norm or float("inf"))
        context.optimizer.step()
        context.optimizer.zero_grad()

    def run() -> float:
        with context.optimizer.visit(block):
            step()
            return timed(context.device, step)

    return run


def steps_of_external(adapter: Adapter, config: RunConfig, folder: Path, *, visit: int | None = None) -> Contender:
    """A step of another package's method. visit: steps between two switches, where it switches what it trains; then
    the mean over a whole cycle."""
    context = external_context(config, folder)
    count = 1 if visit is None else visit * adapter.cycle(context)
    module = ExternalModule(context, adapter.build(context, visit), Techniques())
    (whole_run,) = context.schedule.visits(context.partition)
    numbers = iter(range(1_000_000))

    def step() -> None:
        number = next(numbers)
        take_step(context, module, Techniques(), whole_run, step=number, visit_step=number)

    return lambda: statistics.mean(timed(context.device, step) for _ in range(count))


def random_model(name: str, device: torch.device) -> nn.Module:
    """A model of the planner's list, fp32, random weights, in train mode."""
    torch.manual_seed(0)
    model = meta_model(find_model(name)).to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.zero_()
    return model.train()


def blocks_step(model: nn.Module, tokens: torch.Tensor, blocks: int) -> Contender:
    """A step of AdamW in each of `blocks` in turn; the first step of a visit, which makes the moments, is not timed."""
    device = tokens.device

    def run() -> float:
        partition = bt.partition(model, num_blocks=blocks)
        optimizer = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-5, fused=True)
        spent = []
        for block in partition:
            with optimizer.visit(block):

                def step() -> None:
                    model(input_ids=tokens, labels=tokens).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()

                step()
                spent.append(timed(device, step))
        optimizer.close()
        return statistics.mean(spent)

    return run


def offloaded_step(model: nn.Module, tokens: torch.Tensor) -> Contender:
    """Full training with AdamW's state and step on the host, by torchao; CUDA only."""
    if tokens.device.type != "cuda":
        raise ConfigError("torchao's CPUOffloadOptimizer supports CUDA and XPU devices only")
    try:
        from torchao.optim import CPUOffloadOptimizer  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"offloading needs torchao ({error}); pip install 'blocktrain[peers]'") from None
    made: list[Any] = []

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        made[0].step()
        made[0].zero_grad()

    def run() -> float:
        model.requires_grad_(True)
        made[:] = [CPUOffloadOptimizer(list(model.parameters()), torch.optim.AdamW, lr=1e-5)]
        step()
        return timed(tokens.device, step)

    return run


def peak_of(contender: Contender, device: torch.device) -> int:
    """Bytes the device allocated at most during a step of it, or the resident set on a CPU."""
    reset_peak_memory(device)
    contender()
    return peak_memory_bytes(device)

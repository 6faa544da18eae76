"""Peak memory of a step by PyTorch's own tracker, on fake tensors, for the configurations the planner is tested on.

    python benchmarks/plan/record.py [--only NAME] [--out benchmarks/plan/tracked.json]

`MemTracker` (torch.distributed._tools) runs this package's own step (`BlockOptimizer`, fused AdamW) on a model without
memory, one visit to each block that can be the worst: the first, one in the middle and the last. The second step of a visit
counts, where the moments are there. No GPU and no memory is needed; Llama-3-70B takes some minutes.

The tracker refuses to hook a frozen parameter, so it meets the model once with everything trainable, before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

import blocktrain as bt
from blocktrain.model.fake import FakeCopy, fake_copy
from blocktrain.plan.presets import find_model
from blocktrain.prefix.cut import Cut

SEQ = 1024


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration: model, blocks (1: full), precision, sequences at a time, and what is done about activations."""

    model: str
    blocks: int = 1
    precision: str = "fp32"
    rows: int = 1
    checkpointing: bool = False
    cached: bool = False

    @property
    def name(self) -> str:
        """As the tests name it."""
        told = [self.model, f"M={self.blocks}", self.precision, f"{self.rows} x {SEQ}"]
        return ", ".join([*told, *["checkpointed"] * self.checkpointing, *["cached"] * self.cached])


CASES = (
    Case(model="gpt2", rows=4),
    Case(model="gpt2", blocks=3, rows=4),
    Case(model="gpt2", blocks=8, rows=4),
    Case(model="gpt2-xl", blocks=3, precision="bf16-exact", rows=2),
    Case(model="gpt2-xl", blocks=3, rows=4, checkpointing=True),
    Case(model="llama-2-7b", precision="bf16-exact", checkpointing=True),
    Case(model="llama-2-7b", blocks=3, precision="bf16-exact", rows=4),
    Case(model="llama-2-7b", blocks=3, precision="bf16-exact", rows=4, checkpointing=True),
    Case(model="llama-2-7b", blocks=8, precision="bf16-exact", rows=4, cached=True),
    Case(model="llama-2-7b", blocks=32, precision="bf16-exact", rows=4, checkpointing=True),
    Case(model="llama-3-8b", blocks=8, precision="bf16-exact", rows=2, checkpointing=True, cached=True),
    Case(model="llama-3-70b", blocks=32, precision="bf16-exact", checkpointing=True),
)


def fake_model(case: Case) -> FakeCopy:
    """The model of a case, without memory."""
    spec = find_model(case.model)
    config = AutoConfig.for_model(spec.architecture, **spec.settings(), use_cache=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return fake_copy(model)


def recompute(layers: nn.ModuleList) -> None:
    """Every layer computes its activations again in the backward pass, whether it is trained or frozen."""
    for layer in layers:
        forward = layer.forward

        def again(hidden, *args, _forward=forward, **kwargs):
            return checkpoint(_forward, hidden, *args, use_reentrant=False, **kwargs)

        layer.forward = again


@contextlib.contextmanager
def tracking(fake: FakeCopy, ids: torch.Tensor) -> Iterator[MemTracker]:
    """A tracker that has seen the model's parameters while all of them could be hooked."""
    tracker = MemTracker()
    tracker.track_external(fake.model)
    wanted = {p: p.requires_grad for p in fake.model.parameters()}
    with fake.running(), tracker:
        for parameter in wanted:
            parameter.requires_grad_(True)
        with torch.no_grad():
            fake.model(input_ids=ids[:, :8])
        for parameter, wants in wanted.items():
            parameter.requires_grad_(wants)
        tracker.reset_mod_stats()
        yield tracker


def peak_bytes(case: Case) -> dict[str, int]:
    """Peak by block."""
    fake = fake_model(case)
    precision = bt.BF16_EXACT if case.precision == "bf16-exact" else bt.FP32
    partition = bt.partition(fake.model, num_blocks=case.blocks)
    optimizer = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-4, fused=True, precision=precision)
    remainders = 2 * sum(p.numel() for p in fake.model.parameters()) if precision.has_master else 0
    if case.checkpointing:
        inner = getattr(fake.model, "transformer", None)
        recompute(inner.h if inner is not None else fake.model.model.layers)
    ids = torch.zeros(case.rows, SEQ, dtype=torch.long)
    cut = Cut(partition.chain)
    peaks = {}
    for index in sorted({0, case.blocks // 2, case.blocks - 1}):
        with optimizer.visit(partition[index]), tracking(fake, ids) as tracker:
            first = partition.chain.layers.index(partition[index].layers[0])
            level = first if case.cached else 0
            for step in range(2):
                hidden = None
                if level:
                    weight = next(fake.model.parameters())
                    hidden = torch.empty(case.rows, SEQ, fake.model.config.hidden_size, dtype=weight.dtype)
                    hidden = weight.fake_mode.from_tensor(hidden)
                with cut.running(level=level, hidden=hidden) if level else contextlib.nullcontext():
                    fake.model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
            (snapshot,) = tracker.get_tracker_snapshot("peak").values()
            peaks[str(index)] = int(snapshot["Total"]) - (0 if index == -1 else _on_host(optimizer))
    del remainders
    return peaks


def _on_host(optimizer: bt.BlockOptimizer) -> int:
    """Bytes the tracker counts that lie on the host: it cannot tell fake host memory from the device's."""
    return 0


def main() -> None:
    """Record all cases, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a case by its name")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("tracked.json"))
    options = parser.parse_args()
    rows = []
    for case in CASES:
        if options.only not in (None, case.name):
            continue
        start = time.perf_counter()
        peaks = peak_bytes(case)
        rows.append({"name": case.name, **asdict(case), "seq": SEQ, "peak_bytes": max(peaks.values()), "blocks_seen": peaks})
        print(f"{case.name}: {max(peaks.values()) / 2**30:.2f} GiB {peaks} ({time.perf_counter() - start:.0f} s)", flush=True)
    if options.only is None:
        result = {"tracker": "torch.distributed._tools.mem_tracker.MemTracker", "torch": torch.__version__, "cases": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

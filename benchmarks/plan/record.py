"""Peak memory of a step by a tracker on fake tensors, for the configurations the planner is tested on.

    python benchmarks/plan/record.py [--memtracker] [--only TEXT] [--out benchmarks/plan/tracked.json]

This package's own step runs on a model without memory (`blocktrain.train.verify_plan`), in one visit each to the
first block, a middle one, the largest and the last; the second step of a visit counts. `--memtracker` runs the first
three with PyTorch's MemTracker as well, which finds the same bytes and takes many times as long. This needs no GPU
and little memory. `--only` records only the cases whose names contain a text, and keeps the others.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker

import blocktrain as bt
from blocktrain.memory.fake import fake_copy
from blocktrain.plan.configure import step_config
from blocktrain.plan.layout import Layout, MomentFormat, WeightPlace, find_precision
from blocktrain.plan.presets import find_model
from blocktrain.runtime import environment, pick_device, result_path
from blocktrain.train.config import RunConfig
from blocktrain.train.verify_plan import STEPS, meta_model, tracked_peak

SEQ = 1024


@dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration: model, blocks (1: full training), precision, rows at a time, and how activations are saved."""

    model: str
    blocks: int = 1
    precision: str = "fp32"
    rows: int = 1
    checkpointing: bool = False
    cached: bool = False
    largest: int | None = None
    frozen: WeightPlace = "device"
    moments: MomentFormat = "fp32"
    loss_chunk: int | None = None
    micro_steps: int = 1

    @property
    def name(self) -> str:
        """The name that the tests show."""
        cut = f"M={self.blocks}" if self.largest is None else f"largest {self.largest / 1e6:.0f}M"
        words = [self.model, cut, self.precision, f"{self.rows} x {SEQ}"]
        words += ["checkpointed"] * self.checkpointing + ["cached"] * self.cached
        words += ["streamed"] * (self.frozen == "host") + ["8-bit moments"] * (self.moments == "8bit")
        words += ["chunked loss"] * (self.loss_chunk is not None)
        return ", ".join([*words, *[f"{self.micro_steps} micro-batches"] * (self.micro_steps > 1)])

    @property
    def layout(self) -> Layout:
        """The planner's layout."""
        return Layout(
            blocks=self.blocks,
            precision=find_precision(self.precision),
            micro_rows=self.rows,
            checkpointing="layers" if self.checkpointing else "none",
            cache="host" if self.cached else "off",
            largest=self.largest,
            frozen=self.frozen,
            moments=self.moments,
            loss_chunk=self.loss_chunk,
        )


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
    Case(model="gpt2", blocks=3, precision="bf16", rows=4, moments="8bit", micro_steps=3),
    Case(model="gpt2", blocks=16, largest=10_000_000, rows=4, loss_chunk=512),
    Case(model="llama-2-7b", blocks=8, precision="int8", rows=4),
    Case(model="l-1.5b", blocks=8, precision="bf16-exact", rows=4, checkpointing=True, frozen="host", loss_chunk=512),
    Case(
        model="l-1.5b",
        blocks=132,
        largest=20_000_000,
        precision="nf4",
        rows=2,
        checkpointing=True,
        frozen="host",
        moments="8bit",
        loss_chunk=512,
    ),
)  # fmt: skip


def memtracker_peak(case: Case) -> int:
    """The peak of the middle block by PyTorch's own tracker, in fp32. It cannot hook a frozen parameter, so it first
    meets the model with every parameter trainable."""
    fake = fake_copy(meta_model(find_model(case.model)))
    partition = bt.partition(fake.model, num_blocks=case.blocks)
    optimizer = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-4, fused=True)
    tracker = MemTracker()
    tracker.track_external(fake.model)
    ids = torch.zeros(case.rows, SEQ, dtype=torch.long)
    with optimizer.visit(partition[case.blocks // 2]), fake.running(), tracker:
        wanted = {parameter: parameter.requires_grad for parameter in fake.model.parameters()}
        for parameter in wanted:
            parameter.requires_grad_(True)
        with torch.no_grad():
            fake.model(input_ids=ids[:, :8])
        for parameter, wants in wanted.items():
            parameter.requires_grad_(wants)
        for _ in range(STEPS):
            tracker.reset_mod_stats()
            fake.model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        return int(snapshot["Total"])


def recorded(case: Case, *, memtracker: bool) -> dict[str, Any]:
    """One row of the result file."""
    tables = step_config(find_model(case.model), case.layout, seq=SEQ, rows=case.rows * case.micro_steps)
    peaks = tracked_peak(RunConfig.from_mapping({**tables, "schedule": {"visit": "1 steps", "sweeps": 1}}))
    row = {
        "name": case.name,
        **asdict(case),
        "seq": SEQ,
        "peak_bytes": max(peaks.values()),
        "peak_bytes_by_block": {str(index): peak for index, peak in peaks.items()},
    }
    return row | ({"memtracker_middle_block_bytes": memtracker_peak(case)} if memtracker else {})


def main() -> None:
    """Record the cases, writing the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memtracker", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=result_path, default=str(Path(__file__).with_name("tracked.json")))
    options = parser.parse_args()
    known = {row["name"]: row for row in json.loads(options.out.read_text())["cases"]} if options.out.exists() else {}
    for case in CASES:
        if options.only not in case.name:
            continue
        start = time.perf_counter()
        known[case.name] = recorded(case, memtracker=options.memtracker and case in CASES[:3])
        print(f"{case.name}: {known[case.name]['peak_bytes'] / 2**30:.2f} GiB ({time.perf_counter() - start:.0f} s)")
        rows = [known[case.name] for case in CASES if case.name in known]
        options.out.write_text(
            json.dumps({"environment": environment(pick_device("cpu")), "cases": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

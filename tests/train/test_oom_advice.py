"""A real allocation that fails: one message with a plan, exit code 2, and the last checkpoint as it was."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import blocktrain as bt
from blocktrain.errors import OutOfMemoryError
from blocktrain.records.log import read_events
from blocktrain.records.run_records import MemoryPeaks, PeakMemory
from blocktrain.train.checkpoint import checkpoints
from blocktrain.train.context import build
from blocktrain.train.oom_advice import advice, advise_when_out_of_memory, savings

PARTS = {"activations": 800, "frozen": 400, "moments": 120, "gradients": 60, "active": 60, "logits": 40}
MEMORY = MemoryPeaks(blocks=(PeakMemory(parts=PARTS),), full=PeakMemory(parts=PARTS))

# Trains, and after the fourth step's checkpoint leaves the process 32 MiB: the next step asks for more.
LIMITED = """
import json, resource, sys
import blocktrain as bt

def listener(record):
    if record.kind == "step" and record.step == 5:
        mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 32 * 2**20, -1))

try:
    bt.run(bt.RunConfig.from_mapping(json.loads(sys.argv[1])), sys.argv[2], listeners=[listener])
except bt.BlocktrainError as error:
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    print(json.dumps({"kind": type(error).__name__, "message": str(error), "exit": error.exit_code}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is kept by Linux alone")
def test_a_failed_allocation_ends_the_run_with_a_plan(tiny, tmp_path: Path) -> None:
    """Steps with three times 47 MiB of logits, in a process that is suddenly allowed 32 MiB more."""
    large = ["batch.rows=64", "model.config.vocab_size=12000"]
    config = tiny(*large, "model.config.n_layer=1", "evaluation.rows=4")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, json.dumps(config.to_mapping()), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert (said["kind"], said["exit"]) == ("OutOfMemoryError", 2)
    assert said["message"].startswith("out of memory at step 6 in Block(1")
    assert "the largest part of a step is logits, " in said["message"]
    assert "batch.micro_rows 64 -> 32 saves about " in said["message"]
    (_, newest) = checkpoints(tmp_path / "run" / "checkpoints")
    assert newest.name == "step-00000004"


def test_the_plan_names_the_largest_part_and_the_nearest_changes(tiny, tmp_path: Path) -> None:
    context = build(tiny("batch.rows=8"), tmp_path)
    text = advice(context, PARTS)
    assert text.startswith("the largest part of a step is activations, 800 B (the rest: frozen 400 B, moments 120 B, ")
    order = ["memory.checkpointing = 'layers' saves about 666 B", "batch.micro_rows 8 -> 4 saves about 420 B"]
    order += ["precision = 'bf16-exact' saves about 170 B", "blocks.count 3 -> 6 saves about 90 B"]
    order += ["memory.loss_chunk = 12 saves about 36 B"]
    assert text.endswith("Start again with: " + "; ".join(order))


def test_what_cannot_be_made_smaller_is_not_proposed(tiny, tmp_path: Path) -> None:
    """Everything at its smallest: there is only a layer to be taken apart."""
    smallest = ["batch.micro_rows=1", "blocks.count=6", "precision=nf4"]
    smallest += ["memory.checkpointing=layers", "memory.loss_chunk=1"]
    context = build(tiny(*smallest), tmp_path)
    largest = max(block.num_parameters for block in context.partition)
    assert savings(context, PARTS) == {f"blocks.largest = {largest // 2}": 90}
    assert savings(context, {"frozen": 10, "activations": 10}) == {}


def test_other_errors_pass_unchanged(tiny, tmp_path: Path) -> None:
    context = build(tiny(), tmp_path)
    with pytest.raises(RuntimeError, match="something else"), advise_when_out_of_memory(context, MEMORY, "here"):
        raise RuntimeError("something else")


def test_another_package_s_method_is_offered_no_blocks_and_no_checkpoint(tiny, tmp_path: Path) -> None:
    context = build(tiny("batch.rows=8"), tmp_path)
    with (
        pytest.raises(OutOfMemoryError, match="has no checkpoint and starts over") as refused,
        advise_when_out_of_memory(context, MEMORY, "here", is_external=True),
    ):
        raise MemoryError
    assert "batch.micro_rows 8 -> 4 saves about 420 B" in str(refused.value)
    assert "blocks." not in str(refused.value)
    assert "precision" not in str(refused.value)


def test_the_error_holds_no_tensor_of_the_failed_step(tiny, tmp_path: Path) -> None:
    """They must be gone while the block retires, which may need memory itself."""
    context = build(tiny(), tmp_path)
    seen: list[weakref.ref[torch.Tensor]] = []

    def fail() -> None:
        tensor = torch.ones(3)
        seen.append(weakref.ref(tensor))
        raise MemoryError

    with pytest.raises(OutOfMemoryError), advise_when_out_of_memory(context, MEMORY, "here"):
        fail()
    assert seen[0]() is None


def test_every_run_logs_tracked_peaks(tiny, tmp_path: Path) -> None:
    bt.run(tiny("schedule.visit=1 steps"), tmp_path / "run")
    events = read_events(tmp_path / "run" / "events.jsonl")
    (memory,) = [event for event in events if event["kind"] == "memory"]
    assert len(memory["blocks"]) == 3
    assert sum(memory["full"]["parts"].values()) > max(sum(block["parts"].values()) for block in memory["blocks"])
    retired = [event["peak_memory_bytes"] for event in events if event["kind"] == "retire"]
    assert len(retired) == 3
    assert min(retired) > sum(memory["full"]["parts"].values())

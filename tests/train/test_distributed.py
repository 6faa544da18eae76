"""A run in several processes is the run in one: the same rows, losses and files, whatever their number.

Two processes add two gradients, and so does one process with two micro-batches: these runs are equal bit for bit. Four
add them in another order than four micro-batches do; what that changes is rounding, and a tolerance says how much.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import blocktrain as bt
from blocktrain.errors import BlocktrainError, ConfigError, Interrupted, PeerError
from blocktrain.records.log import Event, read_events
from blocktrain.records.run_records import (
    GrowingStep,
    MemoryPeaks,
    Opening,
    PeakMemory,
    Record,
    RunHeader,
    Step,
    StepCosts,
    StepFlops,
    StepMemory,
)
from blocktrain.testing import run_distributed
from blocktrain.train import run as run_module
from blocktrain.train.blocks_train_module import BLOCKS
from blocktrain.train.checkpoint import checkpoints
from blocktrain.train.context import TrainingContext
from blocktrain.train.techniques.growth import growing_visits

LLAMA = {
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
PLAIN = ["model.config.attn_pdrop=0.0", "model.config.resid_pdrop=0.0", "model.config.embd_pdrop=0.0"]
SELDOM = ["checkpoint.every=50 steps", "evaluation.every=6 steps"]
# Every row of a small subset comes twice in a visit, and in every visit of the sweep.
CACHED = ["sampling.scope=sweep", "sampling.rate=0.01", "schedule.visit=2 epochs", *SELDOM]
UNCACHED = [*CACHED, "prefix.store=off"]

# Sums in another order differ by 2^-24 = 6e-8 of the value; AdamW divides by a gradient's own size, so a parameter
# whose gradient is nothing but rounding moves by the full rate. Measured: 2e-7 of the loss after 100 steps.
TOLERANCE = 5e-6

HALVED = 1e-4  # in bf16, gathered or kept: sums in another order. Measured: 1e-5
IN_BF16 = 5e-4  # against fp32. Measured: 1.3e-4

Mapping = dict[str, Any]


class Crash(BaseException):
    """As sudden as the power going."""


def made_up_opening(context: TrainingContext, header: RunHeader, micro_rows: int | None) -> Opening:
    """Opening records with made-up costs: counting FLOPs and memory takes longer than these runs."""
    blocks = tuple(10 + block.index for block in context.partition)
    layers = tuple(1 for _ in context.partition.chain.layers)
    flops = StepFlops(full=30, blocks=blocks, theory_full=30, theory_blocks=blocks, forward_layers=layers)
    growing = tuple(
        GrowingStep(block=visit.block.index, left_out=len(left_out), flops=5)
        for visit, left_out in growing_visits(context)
    )
    return Opening(
        header=header,
        costs=StepCosts(flops=flops, memory=StepMemory(full={}, blocks=()), growing=growing),
        memory=MemoryPeaks(full=PeakMemory(parts={}), blocks=tuple(PeakMemory(parts={}) for _ in context.partition)),
    )


def count_nothing_here() -> None:
    """Runs of this process open with made-up costs from now on; it is one of a test's own processes."""
    run_module.BLOCKS = replace(BLOCKS, opening=made_up_opening)


def train_all(runs: list[tuple[str, Mapping]]) -> None:
    """Each run into its folder, in this rank's process."""
    count_nothing_here()
    for folder, mapping in runs:
        bt.run(bt.RunConfig.from_mapping(mapping), folder)


def train_until(folder: str, mapping: Mapping, step: int) -> None:
    """Rank 0 crashes after `step`; the other ranks see it."""
    count_nothing_here()

    def crash(record: Record) -> None:
        if isinstance(record, Step) and record.step == step:
            raise Crash

    try:
        bt.run(bt.RunConfig.from_mapping(mapping), folder, listeners=[crash])
    except Crash:
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/none", rank=0, world_size=1)
    except PeerError:
        pass


def resume_all(folders: list[str]) -> None:
    count_nothing_here()
    for folder in folders:
        bt.resume(folder)


def fail(folder: str, mapping: Mapping) -> tuple[str, str]:
    count_nothing_here()
    try:
        bt.run(bt.RunConfig.from_mapping(mapping), folder)
    except BlocktrainError as error:
        return type(error).__name__, str(error)
    return "", ""


def interrupt_rank_1(folder: str, mapping: Mapping) -> tuple[str, int]:
    """A signal to rank 1 alone, as it takes its fifth step."""
    count_nothing_here()
    from blocktrain.train import trainer

    take, taken = trainer.take_step, []

    def step(*args: Any, **keywords: Any) -> Any:
        taken.append(keywords["step"])
        if dist.get_rank() == 1 and len(taken) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(*args, **keywords)

    trainer.take_step = step
    try:
        bt.run(bt.RunConfig.from_mapping(mapping), folder)
    except Interrupted as stop:
        return str(stop), stop.exit_code
    return "", 0


def events_of(run: Path, kind: str) -> list[Event]:
    return [event for event in read_events(run / "events.jsonl") if event["kind"] == kind]


def curve(run: Path) -> list[float]:
    return [event["loss"] for event in events_of(run, "step")]


def evaluations(run: Path) -> list[float]:
    return [event["loss"] for event in events_of(run, "evaluation")]


def learned(run: Path) -> dict[str, str]:
    """Checksums of weights, moments and buffers at the end."""
    manifest = json.loads((checkpoints(run / "checkpoints")[-1] / "checkpoint.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items()}


def close(one: list[float], other: list[float], tolerance: float = TOLERANCE) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= tolerance * abs(a) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def mapping(tiny) -> Callable[..., Mapping]:
    """`mapping("llama", ...)`: the tiny run without dropout, with overrides, as plain data."""

    def make(model: str, *overrides: str) -> Mapping:
        values = tiny(*PLAIN, "optimizer.lr=0.001", *overrides).to_mapping()
        if model == "llama":
            values["model"] = {**values["model"], "architecture": "llama", "config": LLAMA}
        return values

    return make


VARIANTS = {
    "gpt2, uncached": ("gpt2", UNCACHED),
    "gpt2, cached": ("gpt2", [*CACHED, "prefix.store=host"]),
    "gpt2, in a file, ahead": ("gpt2", [*CACHED, "prefix.store=file", "prefix.fill=ahead", "prefix.fill_rows=3"]),
    "llama, uncached": ("llama", UNCACHED),
    "llama, cached": ("llama", [*CACHED, "prefix.store=host", "schedule.order=descending"]),
    "grown by copies": ("gpt2", [*UNCACHED, "model.zero_residuals=true", "model.grown_layers=copied"]),
    "one stream": (
        "gpt2",
        [*SELDOM, "batch.micro_rows=1", "optimizer.state=disk", "precision=bf16-exact", "prefix.store=off"],
    ),
    "apart, averaged in each step": (
        "gpt2",
        [
            *["optimizer.name=SGD", "optimizer.weight_decay=0.0", "optimizer.max_grad_norm=1e9"],
            *["distributed.sync_every=1", "distributed.outer_lr=1.0", "distributed.outer_momentum=0.0"],
        ],
    ),
}


PIPELINE, FSDP = ["distributed.layout=pipeline"], ["distributed.layout=fsdp"]
HALVES = ["precision=bf16-exact", "memory.checkpointing=layers"]
LAYOUTS = {
    "gpt2, pipeline": ("gpt2", [*UNCACHED, *PIPELINE]),
    "llama, pipeline, cached": ("llama", [*CACHED, *PIPELINE, "prefix.store=host"]),
    "gpt2, a piece of each block": ("gpt2", [*CACHED, *PIPELINE, "blocks.stages=2", "prefix.store=file"]),
    "llama, interleaved": ("llama", [*UNCACHED, *PIPELINE, "distributed.pipeline=interleaved"]),
    "llama, pipeline, masters": ("llama", [*CACHED, *PIPELINE, *HALVES, "memory.loss_chunk=8", "prefix.store=host"]),
    "gpt2, fsdp": ("gpt2", [*UNCACHED, *FSDP]),
    "gpt2, fsdp, cached": ("gpt2", [*CACHED, *FSDP, "prefix.store=host"]),
    "llama, fsdp, cached": ("llama", [*CACHED, *FSDP, "prefix.store=file", "schedule.order=descending"]),
    "llama, fsdp": ("llama", [*UNCACHED, *FSDP, "batch.micro_rows=1"]),
    "llama, fsdp, halves": ("llama", [*UNCACHED, *FSDP, *HALVES]),
}
OF_FOUR = ["gpt2, pipeline", "gpt2, fsdp"]  # six layers are too few for more


ALIKE = ["gpt2, cached", "llama, uncached", "grown by copies"]  # with two micro-batches in one process


class Runs(dict[int, Path]):
    """The folder of every variant's run by the number of processes; those of a number are trained when first needed."""

    def __init__(self, mapping: Callable[..., Mapping], folder: Path):
        super().__init__()
        self.mapping, self.folder = mapping, folder

    def __missing__(self, size: int) -> Path:
        folder = self.folder / f"ranks-{size}"
        folder.mkdir()
        layouts = {name: variant for name, variant in LAYOUTS.items() if size < 4 or name in OF_FOUR}
        wanted = [
            (str(folder / name), self.mapping(model, *more)) for name, (model, more) in (VARIANTS | layouts).items()
        ]
        if size == 1:
            for name in ALIKE:
                model, more = VARIANTS[name]
                wanted.append((str(folder / f"{name}, halved"), self.mapping(model, *more, "batch.micro_rows=2")))
        run_distributed(train_all, size, wanted)
        self[size] = folder
        return folder


@pytest.fixture(scope="module")
def runs(mapping, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every variant with 1, 2 and 4 processes."""
    return Runs(mapping, tmp_path_factory.mktemp("ranks"))


TWO_AND_FOUR = [2, pytest.param(4, marks=pytest.mark.slow)]  # four take half of the time of all on two cores


@pytest.mark.parametrize("size", TWO_AND_FOUR)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_losses_with_1_2_and_4_processes(runs: dict[int, Path], name: str, size: int) -> None:
    one = runs[1] / name
    assert len(curve(one)) >= 12
    assert evaluations(one)[0] == evaluations(runs[size] / name)[0]  # a sum without rounding
    assert close(curve(one), curve(runs[size] / name))
    assert close(evaluations(one), evaluations(runs[size] / name))


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 2) for name in LAYOUTS), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in OF_FOUR)],
)
def test_other_layouts_have_the_same_losses(runs: dict[int, Path], name: str, size: int) -> None:
    one, other = runs[1] / name, runs[size] / name
    tolerance = HALVED if HALVES[0] in LAYOUTS[name][1] else TOLERANCE
    assert len(curve(one)) >= 12
    assert close(curve(one), curve(other), tolerance)
    assert close(evaluations(one), evaluations(other), tolerance)
    without_remainders = {file for file in learned(one) if "fsdp" not in name or "remainder" not in file}
    assert learned(other).keys() == without_remainders  # parts are fp32


@pytest.mark.parametrize("name", ALIKE)
def test_two_processes_are_two_micro_batches_bit_for_bit(runs: dict[int, Path], name: str) -> None:
    alone, together = runs[1] / f"{name}, halved", runs[2] / name
    assert curve(alone) == curve(together)
    assert evaluations(alone) == evaluations(together)
    assert learned(alone) == learned(together)


@pytest.mark.parametrize("size", TWO_AND_FOUR)
def test_the_cache_changes_nothing_and_each_row_is_computed_by_one_rank(runs: dict[int, Path], size: int) -> None:
    """Each rank finds in its own cache what it asks for, in the second pass and in the next visit."""
    for name in ("gpt2, cached", "gpt2, in a file, ahead"):
        assert learned(runs[size] / name) == learned(runs[size] / "gpt2, uncached")
    for name in ("gpt2, cached", "gpt2, in a file, ahead", "llama, cached"):
        together, alone = events_of(runs[size] / name, "cached"), events_of(runs[1] / name, "cached")
        assert len(together) == 2
        for counted in ("rows", "hits", "computed", "bytes", "stale", "damaged"):
            assert [event[counted] for event in together] == [event[counted] for event in alone]


def test_shards_have_a_cache_too(runs: dict[int, Path]) -> None:
    """It changes nothing; no row is computed twice, by whatever number of processes."""
    assert learned(runs[2] / "gpt2, fsdp, cached") == learned(runs[2] / "gpt2, fsdp")
    for name in ("gpt2, fsdp, cached", "llama, fsdp, cached"):
        together, alone = events_of(runs[2] / name, "cached"), events_of(runs[1] / name, "cached")
        assert len(together) == 2
        for counted in ("rows", "hits", "computed", "bytes", "stale", "damaged"):
            assert [event[counted] for event in together] == [event[counted] for event in alone]


def fill_the_disk_of_rank_1(folder: str, mapping: Mapping) -> list[str]:
    """As it takes the first step of a visit with a cache; the warnings of this process."""
    count_nothing_here()
    from blocktrain.train import trainer

    take = trainer.take_step

    def step(*args: Any, **keywords: Any) -> Any:
        if dist.get_rank() == 1 and args[2].by_name["prefix_cache"].active_cache is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return take(*args, **keywords)

    trainer.take_step = step
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("blocktrain").addHandler(handler)
    bt.run(bt.RunConfig.from_mapping(mapping), folder)
    return messages


def test_shards_give_their_cache_up_together(runs: dict[int, Path], mapping, tmp_path: Path) -> None:
    values = mapping("gpt2", *CACHED, *FSDP, "prefix.store=file")
    messages = run_distributed(fill_the_disk_of_rank_1, 2, str(tmp_path / "run"), values)
    prefix = "training goes on without a prefix cache: "
    assert [len(warnings) for warnings in messages] == [1, 1]
    assert messages[0][0].startswith(f"{prefix}another process cannot store or read its rows")
    assert messages[1][0].startswith(f"{prefix}no room left while writing")
    assert learned(tmp_path / "run") == learned(runs[2] / "gpt2, fsdp")
    assert [event["place"] for event in events_of(tmp_path / "run", "cache")] == ["file", None]


@pytest.mark.parametrize("size", TWO_AND_FOUR)
def test_one_process_writes_for_all(runs: dict[int, Path], size: int) -> None:
    one, several = runs[1] / "gpt2, uncached", runs[size] / "gpt2, uncached"
    assert {path.name for path in one.iterdir()} == {path.name for path in several.iterdir()}
    kinds = [[event["kind"] for event in read_events(run / "events.jsonl")] for run in (one, several)]
    assert kinds[0] == kinds[1]
    assert json.loads((several / "run.json").read_text())["sessions"][0]["processes"] == size


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4), (4, 2)])
def test_a_run_goes_on_with_another_number_of_processes(
    runs: dict[int, Path], mapping, tmp_path: Path, before: int, after: int
) -> None:
    whole = runs[1] / "gpt2, cached"
    model, more = VARIANTS["gpt2, cached"]
    run_distributed(train_until, before, str(tmp_path / "run"), mapping(model, *more, "checkpoint.every=5 steps"), 8)
    assert 0 < len(curve(tmp_path / "run")) < len(curve(whole))
    run_distributed(resume_all, after, [str(tmp_path / "run")])
    assert close(curve(whole), curve(tmp_path / "run"))
    assert [event["step"] for event in events_of(tmp_path / "run", "step")] == list(range(1, len(curve(whole)) + 1))
    sessions = json.loads((tmp_path / "run" / "run.json").read_text())["sessions"]
    assert [session["processes"] for session in sessions] == [before, after]


def stop_after(folder: str, mapping: Mapping | None, overrides: list[str], step: int) -> None:
    """Begin or go on, and stop with a checkpoint after `step`."""
    count_nothing_here()

    def stop(record: Record) -> None:
        if isinstance(record, Step) and record.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        if mapping is None:
            bt.resume(folder, overrides, listeners=[stop])
        else:
            bt.run(bt.RunConfig.from_mapping(mapping), folder, listeners=[stop])
    except Interrupted:
        pass


MOVES = [
    (2, ["distributed.layout=pipeline"]),
    (2, ["distributed.layout=fsdp"]),
    (1, ["distributed.layout=data", "precision=bf16-exact", "memory.checkpointing=layers"]),
    (2, ["distributed.layout=pipeline", "precision=fp32", "prefix.store=host"]),
]


def test_a_run_is_moved_from_layout_to_layout_in_the_middle_of_its_visits(mapping, tmp_path: Path) -> None:
    """Weights, moments and rows are those of one process; but for some steps in bf16, so are the losses. In each layout
    a block begins its visit with moments that another one has kept."""
    twice = mapping("gpt2", *UNCACHED, "schedule.sweeps=2")
    whole = bt.run(bt.RunConfig.from_mapping(twice), tmp_path / "whole").path
    steps = len(curve(whole))
    at = [steps * (leg + 1) // 5 for leg in range(4)] + [steps + 1]
    for (size, overrides), step in zip([(1, []), *MOVES], at, strict=True):
        begun = twice if step == at[0] else None
        run_distributed(stop_after, size, str(tmp_path / "run"), begun, overrides, step)
    stored = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [session["step"] for session in stored["sessions"]] == [0, *at[:-1]]
    assert stored["config"]["distributed"]["layout"] == "pipeline"
    assert [event["step"] for event in events_of(tmp_path / "run", "step")] == list(range(1, steps + 1))
    assert close(curve(whole)[: at[2]], curve(tmp_path / "run")[: at[2]])
    assert close(curve(whole), curve(tmp_path / "run"), IN_BF16)
    assert close(curve(whole)[at[3] :], curve(tmp_path / "run")[at[3] :])  # not a bit was lost meanwhile
    assert [(event["precision"], event["layout"]) for event in events_of(tmp_path / "run", "run")] == [
        ("fp32", "data"), ("fp32", "pipeline"), ("fp32", "fsdp"), ("bf16-exact", "data"), ("fp32", "pipeline")
    ]  # fmt: skip


APART = ["distributed.sync_every=2", "checkpoint.every=4 steps", "evaluation.every=4 steps", "schedule.visit=5 steps"]


def test_steps_taken_apart_go_on_from_a_checkpoint_as_if_never_interrupted(mapping, tmp_path: Path) -> None:
    """Moments and outer momentum are in the checkpoint, which is made where all ranks are equal."""
    values = mapping("gpt2", *APART, "schedule.sweeps=2")
    run_distributed(train_all, 2, [(str(tmp_path / "whole"), values)])
    run_distributed(train_until, 2, str(tmp_path / "run"), values, 22)
    run_distributed(resume_all, 2, [str(tmp_path / "run")])
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert curve(tmp_path / "whole")[-1] < curve(tmp_path / "whole")[0]  # it trains


def test_a_checkpoint_where_the_ranks_differ_is_refused(mapping, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"3 steps, which is not a multiple of distributed.sync_every = 2"):
        bt.run(bt.RunConfig.from_mapping(mapping("gpt2", *APART, "checkpoint.every=3 steps")), tmp_path / "run")


def test_a_signal_to_one_rank_stops_all_at_the_same_step_with_a_checkpoint(mapping, tmp_path: Path) -> None:
    results = run_distributed(interrupt_rank_1, 2, str(tmp_path / "run"), mapping("gpt2"))
    assert results == [(f"stopped at step 5; go on with: blocktrain resume {tmp_path}/run", 143)] * 2
    assert checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-00000005"


def test_what_stops_one_rank_stops_all_with_a_reason(mapping, tmp_path: Path) -> None:
    """A loss that is not finite is the same error on all; a folder that is taken, rank 0's and what the others say."""
    values = mapping("gpt2", "optimizer.lr=1e30", "optimizer.max_grad_norm=1e30")
    results = run_distributed(fail, 2, str(tmp_path / "run"), values)
    assert results[0] == results[1]
    assert results[0][0] == "NonFiniteError"
    taken = run_distributed(fail, 2, str(tmp_path / "run"), values)
    assert taken[0][0] == "ConfigError"
    assert taken[1][0] == "PeerError"
    assert "rank 0 did: " in taken[1][1]
    assert "already holds a run" in taken[1][1]


@pytest.mark.parametrize("layout", ["data", "pipeline", "fsdp"])
def test_a_visit_whose_steps_are_all_skipped_is_saved(mapping, tmp_path: Path, layout: str) -> None:
    """Its block has changed in nothing, and has a state for the first time."""
    values = mapping("gpt2", f"distributed.layout={layout}", "optimizer.lr=1e30", "on_nonfinite=skip")
    results = run_distributed(fail, 2, str(tmp_path / "run"), values)
    assert [name for name, _ in results] == ["NonFiniteError"] * 2
    assert "has ended, but its validation loss is nan" in results[0][1]
    assert all(event["skipped"] for event in events_of(tmp_path / "run", "step")[1:])
    assert len(learned(tmp_path / "run")) == 6


UNEVEN = [*PIPELINE, "batch.rows=6", "batch.micro_rows=2"]
FOUR_STAGES = [*PIPELINE, "model.config.n_layer=6", "blocks.count=2", "blocks.stages=4"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (UNEVEN, "batch.micro_rows = 2 must divide the 3 rows of a step"),
        (FOUR_STAGES, "there are 2 processes, which run one stage each"),
        ([*FSDP, "blocks.largest=400"], "which cannot be sharded"),
        ([*PIPELINE, "distributed.pipeline=interleaved", "blocks.count=6"], "cannot share the layers"),
    ],
)
def test_what_cannot_be_laid_out_is_found_before_anything_is_written(
    mapping, tmp_path: Path, overrides: list[str], reason: str
) -> None:
    results = run_distributed(fail, 2, str(tmp_path / "run"), mapping("gpt2", *overrides))
    assert [name for name, _ in results] == ["ConfigError"] * 2
    assert reason in results[0][1]
    assert not (tmp_path / "run").exists()


def test_a_move_that_fails_is_forgotten(tiny, tmp_path: Path) -> None:
    run = bt.run(tiny(), tmp_path / "run").path
    before = (run / "run.json").read_text()
    with pytest.raises(BlocktrainError):
        bt.resume(run, ["device=cuda:99"])
    assert (run / "run.json").read_text() == before


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["distributed.layout=fsdp", "optimizer.name=Muon"], "does not go with optimizer.name = 'Muon'"),
        (["distributed.layout=pipeline", "precision=int8"], "'pipeline' does not go with precision = 'int8'"),
        (["distributed.layout=pipeline", "schedule.span=suffix"], "does not go with schedule.span = 'suffix'"),
        (["distributed.layout=pipeline", "distributed.sync_every=2"], "set layout = 'data', not 'pipeline'"),
    ],
)
def test_what_a_layout_does_not_go_with_is_named(mapping, overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        mapping("gpt2", *overrides)


def test_what_is_learned_cannot_be_changed_in_a_run_that_has_begun(tiny) -> None:
    with pytest.raises(ConfigError, match=r"'optimizer\.lr' cannot be changed after a run has started"):
        tiny().resumed_with(["optimizer.lr=0.1"])
    assert tiny().resumed_with([]) == tiny()
    assert tiny().resumed_with(["device=cuda:1"]).device == "cuda:1"
    apart = tiny("distributed.sync_every=2", "checkpoint.every=4 steps", "evaluation.every=4 steps")
    assert apart.resumed_with(["distributed.sync_every=none"]).distributed.sync_every is None


def test_rows_that_cannot_be_shared_evenly(mapping, tmp_path: Path) -> None:
    results = run_distributed(fail, 3, str(tmp_path / "run"), mapping("gpt2"))
    assert [name for name, _ in results] == ["ConfigError"] * 3
    assert "4 rows per step cannot be divided equally among 3 ranks" in results[0][1]
    assert not (tmp_path / "run").exists()

"""A run whose layers begin as the identity: those that no visit has reached are left out, and nothing but the cost
is different."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

import blocktrain as bt
from blocktrain.chain.freezing import evaluating
from blocktrain.chain.model_loading import ModelConfig
from blocktrain.errors import ConfigError
from blocktrain.memory.flops import StepCounter
from blocktrain.records.log import Event, read_events
from blocktrain.records.run_records import Record, Step
from blocktrain.report.run import RunRecord
from blocktrain.report.summary import summary
from blocktrain.train.context import build
from blocktrain.train.techniques import growth
from blocktrain.train.techniques.growth import Growth, left_out

ZERO = "model.zero_residuals=true"  # four layers in three blocks: embedding; 0 and 1; 2, 3 and the head
COSTS = {"cost", "cache", "cached", "end"}


def crash(record: Record) -> None:
    """At step 7, which is in the second visit."""
    if isinstance(record, Step) and record.step == 7:
        raise KeyboardInterrupt


def outside(config: bt.RunConfig, folder: Path) -> list[tuple[int, int]]:
    """Block, and number of layers left out, of the first visits."""
    context = build(config, folder)
    visits = islice(context.schedule.visits(context.partition), 6)
    return [(visit.block.index, len(left_out(context, visit))) for visit in visits]


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param(("schedule.sweeps=2", "blocks.pieces=modules"), marks=pytest.mark.slow),
        ("model.grown_layers=copied", "blocks.pieces=modules"),
        pytest.param(("optimizer.max_grad_norm=none", "optimizer.in_backward=true"), marks=pytest.mark.slow),
        ("memory.frozen=host", "memory.checkpointing=layers"),
        pytest.param(("precision=bf16-exact",), marks=pytest.mark.slow),
        pytest.param(
            ("prefix.store=host", "sampling.scope=sweep", "sampling.rate=0.05", "schedule.visit=2 epochs"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "pieces", "copied", "in-backward", "streamed", "bf16", "cached"],
)
def test_left_out_or_not_a_run_is_the_same(
    tiny, outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    def learned(folder: Path) -> tuple[list[Event], dict[str, str]]:
        log, files = outcome(folder)
        grown = ("left_out", "step_flops")
        log = [{k: v for k, v in event.items() if k not in grown} for event in log if event["kind"] not in COSTS]
        return log, {name: file for name, file in files.items() if name.endswith("safetensors")}

    config = tiny(ZERO, *overrides)
    bt.run(config, tmp_path / "grown")
    visits = [event for event in read_events(tmp_path / "grown" / "events.jsonl") if event["kind"] == "visit"]
    assert [visit.get("left_out", 0) for visit in visits[:3]] == (
        [3, 1, 0] if "blocks.pieces=modules" in overrides else [4, 2, 0]
    )
    monkeypatch.setattr(growth, "left_out", lambda _job, _visit: ())
    bt.run(config, tmp_path / "whole")
    grown, whole = learned(tmp_path / "grown"), learned(tmp_path / "whole")
    assert grown == whole
    assert grown[1]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("model.grown_layers=copied",), marks=pytest.mark.slow),
        ("model.grown_layers=copied", "blocks.pieces=modules"),
    ],
    ids=["drawn", "copied", "pieces"],
)
def test_an_interrupted_run_goes_on_with_the_same_layers(
    tiny, outcome, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """At step 7 it stands in the second visit, the first to reach two layers; one of them is cut in pieces, of which
    the next block has one."""
    config = tiny(ZERO, "checkpoint.every=2 steps", *overrides)
    bt.run(config, tmp_path / "whole")

    with pytest.raises(KeyboardInterrupt):
        bt.run(config, tmp_path / "run", listeners=[crash])
    bt.resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.parametrize(
    "overrides",
    [(), ("precision=bf16-exact",), ("precision=int8",), ("memory.frozen=host", "memory.checkpointing=layers")],
    ids=["plain", "bf16", "packed", "streamed"],
)
def test_layers_begin_as_copies_of_those_below_them(tiny, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Blocks: embedding; layers 0 and 1; 2, 3 and the head. The loss stays, since the last matrices are zero still."""
    context = build(tiny(ZERO, "model.grown_layers=copied", "schedule.sweeps=2", *overrides), tmp_path)

    def weights(layer: int) -> dict[str, torch.Tensor]:
        known = {name: value for at in range(3) for name, value in context.optimizer.block_weights(at).items()}
        prefix = f"transformer.h.{layer}."
        return {name.removeprefix(prefix): value.clone() for name, value in known.items() if name.startswith(prefix)}

    def loss() -> torch.Tensor:
        with evaluating(context.model):
            return context.model(**context.data.train.batch(range(4))).loss.detach()

    visits = list(islice(context.schedule.visits(context.partition), 4))
    for visit in visits[:2]:  # what is there to copy is reached by now, and not by a visit that copied it
        Growth(context).before_visit(visit)
    drawn, before = [weights(layer) for layer in range(4)], loss()
    assert not torch.equal(drawn[0]["mlp.c_fc.weight"], drawn[1]["mlp.c_fc.weight"])
    Growth(context).before_visit(visits[2])
    zero = {f"{part}.c_proj.{kind}" for part in ("attn", "mlp") for kind in ("weight", "bias")}
    for layer, source in ((2, 0), (3, 1)):
        copy = weights(layer)
        assert all(torch.equal(copy[name], drawn[source][name]) for name in copy.keys() - zero)
        assert not any(copy[name].any() for name in zero)
        assert not torch.equal(copy["mlp.c_fc.weight"], drawn[layer]["mlp.c_fc.weight"])
    assert torch.equal(loss(), before)
    changed = weights(2)
    Growth(context).before_visit(visits[3])
    assert all(torch.equal(value, changed[name]) for name, value in weights(2).items())


def test_a_schedule_that_never_reaches_a_layer_goes_on(tiny, tmp_path: Path) -> None:
    endless = ("schedule.order=[0, 1]", "schedule.sweeps=none", "stop.duration=6 steps")
    run = bt.run(tiny(ZERO, "model.grown_layers=copied", *endless), tmp_path)
    assert [visit.left_out for visit in RunRecord.load(run.path).visits] == [4, 2]


def test_the_second_sweep_leaves_out_what_no_visit_reaches(tiny, tmp_path: Path) -> None:
    """A step of block 0 without two layers, in the second sweep, costs other than without four: both are timed."""
    context = build(tiny(ZERO, "schedule.order=[0, 1]", "schedule.sweeps=3"), tmp_path)
    kinds = [(visit.block.index, visit.sweep, len(layers)) for visit, layers in growth.growing_visits(context)]
    assert kinds == [(0, 0, 4), (1, 0, 2), (0, 1, 2)]


def test_masters_of_a_copy_begin_at_its_weights(tiny, tmp_path: Path) -> None:
    context = build(tiny(ZERO, "model.grown_layers=copied", "precision=bf16-exact"), tmp_path)
    for visit in islice(context.schedule.visits(context.partition), 3):
        Growth(context).before_visit(visit)
    assert context.optimizer.block_low_bits(1)["transformer.h.0.mlp.c_fc.weight"].any()
    assert not context.optimizer.block_low_bits(2)["transformer.h.2.mlp.c_fc.weight"].any()


def test_flops_are_those_of_the_layers_that_run(tiny, tmp_path: Path) -> None:
    config = tiny(ZERO, "schedule.sweeps=2")
    bt.run(config, tmp_path)
    record, context = RunRecord.load(tmp_path), build(config, tmp_path / "again")
    assert context.growth is not None
    assert record.cost is not None
    first, second = record.visits[0].step_flops, record.visits[1].step_flops
    assert first is not None
    assert second is not None
    assert record.end is not None
    batch = context.data.train.batch(range(4))
    with context.growth.without(context.growth.layers):
        step = StepCounter(context.model.train(), batch).training(context.partition[0].parameters)
    assert step == pytest.approx(first, rel=0.01)  # attention with dropout takes another kernel
    known = first + second + sum(record.cost.flops.blocks)
    assert record.end.flops == 4 * (known + record.cost.flops.blocks[2])
    assert record.flops_until(record.steps_done) == record.end.flops
    assert record.flops_until(6) == 4 * first + 2 * second


def test_what_is_left_out_is_not_saved_by_a_cache_too(tiny, tmp_path: Path) -> None:
    """From the top down, in the first sweep the prefix of every visit is left out."""
    cached = ("prefix.store=host", "sampling.scope=sweep", "sampling.rate=0.05", "schedule.visit=2 epochs")
    config = tiny(ZERO, *cached, "schedule.order=descending", "model.config.attn_pdrop=0.0")
    record = RunRecord.load(bt.run(config, tmp_path).path)
    assert [use.flops_saved for use in record.cache_uses] == [0, 0]
    assert record.end is not None
    assert record.end.flops == record.uncached_flops_until(record.steps_done)
    assert record.cost is not None
    assert record.mean_step_flops(2) == record.visits[0].step_flops
    assert record.visit_flops(record.visits[0]) < record.cost.flops.blocks[2]


def test_a_grown_run_that_is_moved_to_another_layout_is_still_reported(tiny, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        bt.run(tiny(ZERO), tmp_path, listeners=[crash])
    bt.resume(tmp_path, ["distributed.layout=pipeline"])
    record = RunRecord.load(tmp_path)
    assert record.end is not None
    assert record.flops_until(record.steps_done) == record.end.flops
    assert summary(record).layers_left_out == 4


def test_a_layer_is_run_from_the_visit_on_that_reaches_it(tiny, tmp_path: Path) -> None:
    assert outside(tiny("schedule.sweeps=2"), tmp_path) == [(0, 0), (1, 0), (2, 0)] * 2
    assert outside(tiny(ZERO, "schedule.sweeps=2"), tmp_path) == [(0, 4), (1, 2), (2, 0), (0, 0), (1, 0), (2, 0)]
    assert outside(tiny(ZERO, "schedule.order=descending"), tmp_path) == [(2, 2), (1, 0), (0, 0)]
    assert outside(tiny(ZERO, "schedule.order=[0, 0, 1, 0]"), tmp_path) == [(0, 4), (0, 4), (1, 2), (0, 2)]
    assert outside(tiny(ZERO, "schedule.span=suffix"), tmp_path) == [(0, 0), (1, 0), (2, 0)]
    moving = ("optimizer.tail=sgd", "optimizer.max_grad_norm=none")
    assert outside(tiny(ZERO, *moving), tmp_path) == [(0, 0), (1, 0), (2, 0)]
    for key in ("distributed.layout=pipeline", "distributed.layout=fsdp", "blocks.frozen_dropout=true"):
        assert outside(tiny(ZERO, key), tmp_path) == [(0, 0), (1, 0), (2, 0)]


def test_first_visits_last_as_long_as_they_are_asked_to(tiny, tmp_path: Path) -> None:
    config = tiny('schedule.first_visits=["6 steps", "1 steps"]', "schedule.sweeps=2")
    assert build(config, tmp_path / "context").total_steps == 6 + 1 + 4 * 4
    bt.run(config, tmp_path / "run")
    assert [visit.step for visit in RunRecord.load(tmp_path / "run").visits] == [0, 6, 7, 11, 15, 19]
    ended = [event["reason"] for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "retire"]
    assert ended == ["6 steps done", "1 steps done", *["4 steps done"] * 4]
    assert bt.RunConfig.from_mapping(config.to_mapping()) == config


def test_what_cannot_begin_so_is_refused(tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="would throw away what the weights at 'm' have learned; leave it out"):
        ModelConfig(path="m", zero_residuals=True)
    with pytest.raises(ConfigError, match="is for transformers, not for 'resnet20'; leave it out"):
        ModelConfig(architecture="resnet20", zero_residuals=True)
    ModelConfig(path="m", weights="random", zero_residuals=True)
    with pytest.raises(ConfigError, match="begin as the identity: set zero_residuals = true"):
        ModelConfig(architecture="gpt2", grown_layers="copied")
    with pytest.raises(ConfigError, match=r"'fsdp' does not go with model\.grown_layers = 'copied'; change it"):
        tiny(ZERO, "model.grown_layers=copied", "distributed.layout=fsdp")

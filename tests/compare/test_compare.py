"""Every method on the same tiny model: the rows, evaluations and records of a run of ours, by another trainer."""

from __future__ import annotations

import gc
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rivals.lisa import lisa
from rivals.packages import configured_blocks
from transformers import GPT2LMHeadModel

from blocktrain.chain.freezing import evaluating
from blocktrain.cli.main import main
from blocktrain.compare.adapter import ADAPTERS, Adapter
from blocktrain.compare.compare import Search, compare
from blocktrain.compare.external_module import ExternalMethod, ExternalModule
from blocktrain.compare.external_setup import MethodCosts, external_context, measure_costs
from blocktrain.compare.methods import METHODS, external, method
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.records.log import read_events
from blocktrain.records.run_records import Record, RunEnd
from blocktrain.report.comparison_table import comparison_rows
from blocktrain.report.run import RunRecord
from blocktrain.train.config import RunConfig
from blocktrain.train.context import TrainingContext
from blocktrain.train.export import export
from blocktrain.train.run import resume
from blocktrain.train.step import StepResult, take_step
from blocktrain.train.technique import Techniques
from blocktrain.units import BatchGeometry, Duration

MakeConfig = Callable[..., RunConfig]

PLAIN = ("schedule.visit=3 steps", "batch.rows=2", "model.config.attn_pdrop=0.0", "model.config.resid_pdrop=0.0")
HEADS = {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 8}
PACE = BatchGeometry(tokens_per_step=32, rows_per_step=2, rows_per_epoch=100)


def context_for(name: str, config: RunConfig, out: Path):
    """The context that method `name` would train for 9 steps."""
    return external_context(external(name, ADAPTERS[name])(config, 9, PACE), out)


def require(name: str) -> Adapter:
    """The adapter, skipping where its method cannot run."""
    adapter = ADAPTERS[name]
    if adapter.cuda_only is not None and not torch.cuda.is_available():
        pytest.skip(adapter.cuda_only)
    if adapter.module is not None and importlib.util.find_spec(adapter.module.partition(".")[0]) is None:
        pytest.skip(f"{adapter.package} is not installed")
    return adapter


def take(module: ExternalModule, step: int) -> StepResult:
    """One step of the only visit of the module's run."""
    (visit,) = module.context.schedule.visits(module.context.partition)
    return take_step(module.context, module, Techniques(), visit, step=step, visit_step=step)


def costs_of(adapter: Adapter, context: TrainingContext, visits: int | None = None) -> MethodCosts:
    visits = visits or adapter.cycle(context)
    module = ExternalModule(context, adapter.build(context, 3), Techniques())
    return measure_costs(context, module, visits=visits)


def test_lisa_and_full_see_the_same_rows_and_are_recorded_alike(tiny: MakeConfig, tmp_path: Path) -> None:
    config = tiny(*PLAIN)
    comparison = compare(config, ["full", "lisa"], tmp_path)
    full, other = (RunRecord.load(folder.path) for folder in comparison.folders)
    assert full.evaluations[0].loss == other.evaluations[0].loss  # the same model and validation rows
    assert full.steps[0].loss == other.steps[0].loss  # and training rows
    assert [row.step for row in full.evaluations] == [row.step for row in other.evaluations]
    assert other.end is not None
    assert other.end.loss is not None
    assert other.end.steps == full.steps_done == 9
    assert other.end.loss < other.evaluations[0].loss
    first, second = comparison_rows([full, other], ["full", "lisa"])
    assert 0.5 < second.flops / first.flops < 1  # its backward pass runs through, its weight gradients do not
    assert second.peak_bytes is not None
    assert first.peak_bytes is not None
    assert second.peak_bytes < first.peak_bytes
    assert first.multiplier is None
    assert second.cross_multiplier is None
    trials = json.loads((tmp_path / "trials.json").read_text())
    assert [trial["method"] for trial in trials] == ["full", "lisa"]
    before = other.folder.joinpath("events.jsonl").read_bytes()
    compare(config, ["full", "lisa"], tmp_path)  # all done: nothing is trained again
    assert other.folder.joinpath("events.jsonl").read_bytes() == before


def test_lisa_trains_both_ends_and_two_layers_and_keeps_moments(tiny: MakeConfig, tmp_path: Path) -> None:
    context = context_for("lisa", tiny(*PLAIN), tmp_path)
    module = ExternalModule(context, lisa(context, 2), Techniques())
    trained, owned = [], context.partition.chain.owned
    for step in range(6):
        take(module, step)
        trained.append({index for index, mine in enumerate(owned) if any(p.requires_grad for p in mine.values())})
    assert all({0, 5} < layers and len(layers) == 4 for layers in trained)
    assert trained[0] == trained[1]
    assert len({frozenset(layers) for layers in trained}) > 1
    ever = {name for index in set().union(*trained) for name in owned[index]}
    named = {id(p): name for name, p in context.model.named_parameters()}
    kept = {named[id(p)] for optimizer in module.method.optimizers for p in optimizer.state}
    assert kept == ever  # a frozen layer's moments stay, as in the authors' trainer


def test_a_search_gives_each_method_the_same_runs_and_picks_the_best(tiny: MakeConfig, tmp_path: Path) -> None:
    config = tiny(*PLAIN, "schedule.visit=1 steps")
    found = compare(config, ["full", "lisa"], tmp_path, search=Search(factors=(0.01, 1.0), seeds=2))
    for name in ("full", "lisa"):
        mine = [trial for trial in found.trials if trial.method == name]
        assert [(trial.factor, trial.seed) for trial in mine] == [(0.01, 0), (1.0, 0), (1.0, 1)]
        low, high = mine[0].loss, mine[1].loss
        assert low is not None
        assert high is not None
        assert high < low
    assert [folder.path.name for folder in found.folders] == ["lr-1-seed-0"] * 2


def test_a_rate_that_diverges_is_not_the_best(tiny: MakeConfig, tmp_path: Path) -> None:
    """Also where steps that are not finite are skipped, so that the run comes to its end."""
    config = tiny(*PLAIN, "on_nonfinite=skip", "optimizer.name=SGD", "optimizer.max_grad_norm=none")
    found = compare(config, ["bcd"], tmp_path, search=Search(factors=(1e25, 1.0), seeds=2))
    assert [trial.factor for trial in found.trials] == [1e25, 1.0, 1.0]
    assert found.trials[0].loss is None
    assert found.folders[0].path.name == "lr-1-seed-0"


def test_a_peer_takes_no_part_in_the_order_of_blocks(tiny: MakeConfig, tmp_path: Path) -> None:
    folders = compare(tiny(*PLAIN, "schedule.order=[0, 2, 1]"), ["bcd", "lisa"], tmp_path).folders
    assert RunRecord.load(folders[1].path).steps_done == 9


def test_a_peers_run_is_neither_resumed_nor_exported(tiny: MakeConfig, tmp_path: Path) -> None:
    (folder,) = compare(tiny(*PLAIN), ["lisa"], tmp_path).folders
    before = folder.events.read_bytes()
    for attempt in (lambda: resume(folder.path), lambda: export(folder, tmp_path / "model")):
        with pytest.raises(
            CheckpointError, match="of method 'lisa', which keeps no checkpoints; run the same comparison"
        ):
            attempt()
    assert folder.events.read_bytes() == before


def test_one_model_at_a_time_is_in_memory(tiny: MakeConfig, tmp_path: Path) -> None:
    alive = []

    def models() -> int:
        return sum(type(thing) is GPT2LMHeadModel for thing in gc.get_objects())

    def count(record: Record) -> None:
        if isinstance(record, RunEnd):
            gc.collect()
            alive.append(models())

    gc.collect()
    before = models()
    compare(tiny(*PLAIN), ["bcd", "lisa"], tmp_path, listeners=lambda _folder: [count])
    assert [seen - before for seen in alive] == [1, 1]


@pytest.mark.parametrize("name", ["badam", "galore", "apollo", "lomo", "lora"])
def test_a_peer_trains(name: str, tiny: MakeConfig, tmp_path: Path) -> None:
    """Its loss on the rows it was trained on falls, and it moves what its paper says."""
    adapter = require(name)
    config = tiny(*PLAIN, "optimizer.lr=0.003")
    context = context_for(name, config, tmp_path)
    before = {key: p.detach().clone() for key, p in context.model.named_parameters()}
    module = ExternalModule(context, adapter.build(context, 2), Techniques())

    def loss() -> float:
        with torch.no_grad(), evaluating(module.model):
            return module.model(**seen).loss.item()

    seen = context.data.train.batch(range(12))
    untrained = loss()
    for step in range(6):
        take(module, step)
    assert loss() < untrained - 0.02
    moved = {key for key, p in context.model.named_parameters() if key in before and not torch.equal(p, before[key])}
    assert moved == (set() if name == "lora" else before.keys())  # LoRA moves its adapters only
    measured = context_for(name, config, tmp_path)
    costs = costs_of(adapter, measured)
    assert costs.flops > 0
    assert costs.peak.bytes > sum(p.nbytes for p in before.values())
    assert (costs.optimizer_bytes == 0) == (name == "lomo")
    assert (costs.gradient_bytes == 0) == (name == "lomo")


def test_state_that_a_method_drops_between_steps_counts_at_its_most(tiny: MakeConfig, tmp_path: Path) -> None:
    """BAdam forgets its moments at each switch; the record's `optimizer_bytes` is what the card had to hold."""
    context = context_for("lisa", tiny(*PLAIN), tmp_path)
    optimizer = torch.optim.AdamW(context.model.parameters(), lr=0.0)
    method = ExternalMethod(model=context.model, optimizers=[optimizer])
    module = ExternalModule(context, method, Techniques(), known_state_bytes=10)
    assert module.state_bytes() == 10
    take(module, 0)
    kept = method.state_bytes()
    assert module.state_bytes() == kept > 2 * sum(p.nbytes for p in context.model.parameters())
    optimizer.state.clear()
    assert module.state_bytes() == kept


def test_lora_trains_the_new_head_of_a_classifier(tmp_path: Path) -> None:
    adapter = require("lora")
    for split, count in (("train", 8), ("test", 4)):
        rows = [f"{'good' if at % 2 else 'bad'} {at},{at % 2}" for at in range(count)]
        (tmp_path / f"{split}.csv").write_text("\n".join(["text,label", *rows]))
    config = RunConfig.from_mapping(
        {
            "labelled": {"source": str(tmp_path), "row_tokens": 8, "cache": str(tmp_path / "cache")},
            "model": {"architecture": "bert", "config": {"num_hidden_layers": 2, "hidden_size": 8, **HEADS}},
            "schedule": {"visit": "3 steps", "sweeps": 1},
            "batch": {"rows": 2},
        }
    )
    method_of = adapter.build(context_for("lora", config, tmp_path), None)
    trained = {name for name, p in method_of.model.named_parameters() if p.requires_grad}
    assert any("classifier" in name and "lora" not in name for name in trained)
    assert all("classifier" in name or "lora" in name for name in trained)


def test_a_method_that_begins_with_frozen_layers_is_compared(
    tiny: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BAdam freezes all blocks but the first when it is built; its blocks were counted only then, and blocks in which
    nothing requires gradients are refused: no comparison with it got past its measurement."""

    def freezing(context: TrainingContext, period: int | None) -> ExternalMethod:
        last = list(context.partition.chain.owned[-1].values())
        context.model.requires_grad_(False)
        for parameter in last:
            parameter.requires_grad_(True)
        return ExternalMethod(model=context.model, optimizers=[torch.optim.AdamW(last, lr=0.01)])

    adapter = Adapter(build=freezing, cycle=lambda context: len(configured_blocks(context)))
    monkeypatch.setitem(ADAPTERS, "freezing", adapter)
    (folder,) = compare(tiny(*PLAIN, "schedule.visit=1 steps"), ["freezing"], tmp_path).folders
    assert RunRecord.load(folder.path).end is not None


def test_badam_costs_what_a_block_costs(tiny: MakeConfig, tmp_path: Path) -> None:
    adapter = require("badam")
    full, blocks = tiny(*PLAIN), tiny(*PLAIN, "blocks.count=3")
    flops = []
    for name, config in (("lisa", full), ("badam", blocks)):
        context = context_for(name, config, tmp_path)
        flops.append(costs_of(ADAPTERS[name], context, visits=adapter.cycle(context)).flops)
    assert flops[1] < flops[0]  # its backward pass stops at the active block


def test_badam_refuses_a_schedule_that_it_cannot_follow(tiny: MakeConfig, tmp_path: Path) -> None:
    context = context_for("badam", tiny(*PLAIN, "schedule.kind=blocktrain.schedule:Cyclic"), tmp_path)
    with pytest.raises(ConfigError, match=r"badam cannot follow schedule\.kind = 'blocktrain\.schedule:Cyclic'"):
        ADAPTERS["badam"].build(context, None)


def test_lomo_cannot_accumulate(tiny: MakeConfig, tmp_path: Path) -> None:
    adapter = require("lomo")
    context = context_for("lomo", tiny(*PLAIN, "batch.micro_rows=1"), tmp_path)
    with pytest.raises(ConfigError, match=r"leave batch\.micro_rows out"):
        adapter.build(context, None)


def test_a_missing_package_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Adapter(build=lisa, module="no_such_package", package="nosuch")
    monkeypatch.setitem(ADAPTERS, "missing", missing)
    with pytest.raises(ConfigError, match=r"needs nosuch.*pip install nosuch"):
        missing.require("missing", torch.device("cpu"))


def test_what_needs_a_gpu_says_so_before_anything_is_trained(tiny: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a CUDA device.*CUDA and XPU devices only"):
        compare(tiny(), ["full", "offload"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_method_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'badam'"):
        method("badamm", torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "rate", "optimizer"), [("full-sgd", 1.0, "SGD"), ("full-muon", 0.01, "Muon"), ("lomo", 1.0, "AdamW")]
)
def test_rates_are_usual_for_the_method(name: str, rate: float, optimizer: str, tiny: MakeConfig) -> None:
    change = METHODS[name].change if name in METHODS else external(name, ADAPTERS[name])
    theirs = change(tiny(), 9, PACE)
    assert theirs.optimizer.lr == pytest.approx(rate)
    assert theirs.optimizer.name == optimizer
    assert theirs.stop.duration == Duration.steps(9)


def test_the_command_line_refuses_what_is_not_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "quickstart.toml"
    assert main(["compare", str(example), "--lr-search", "fast", "--out", str(tmp_path / "out")]) == 2
    assert "such as 0.5,1,2" in capsys.readouterr().err


def test_an_interrupted_peer_starts_again(tiny: MakeConfig, tmp_path: Path) -> None:
    compare(tiny(*PLAIN), ["lisa"], tmp_path)
    log = tmp_path / "lisa" / "events.jsonl"
    whole = [{k: v for k, v in event.items() if k not in TIMED} for event in read_events(log)]
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:6]))
    compare(tiny(*PLAIN), ["lisa"], tmp_path)
    assert [{k: v for k, v in event.items() if k not in TIMED} for event in read_events(log)] == whole


TIMED = ("seconds", "peak_memory_bytes")

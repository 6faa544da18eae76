"""The block optimizer steps as PyTorch's own does, on one block at a time, and moves nothing else."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocktrain.chain.block import Block, Partition
from blocktrain.chain.partition import partition
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.factory import nothing
from blocktrain.optim.precision import BF16, BF16_EXACT, FP32, INT8, NF4, PRESETS, Precision, join
from blocktrain.optim.state_store import BlockState, Drop, KeepOnDisk, KeepOnHost, StateStore
from blocktrain.optim.weight_store import OnDevice, OnHost, WeightLocation
from blocktrain.schedule import Cyclic, Span
from blocktrain.units import Duration

Class = tuple[type[torch.optim.Optimizer], dict[str, Any]]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_state(a: BlockState | None, b: BlockState | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.keys() != b.keys() or any(a[name].keys() != b[name].keys() for name in a):
        return False
    pairs = [(a[name][key], b[name][key]) for name in a for key in a[name]]
    return all(torch.equal(x, y) and x.dtype == y.dtype if torch.is_tensor(x) else x == y for x, y in pairs)


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def train(optimizer: BlockOptimizer, batch, steps: range) -> None:
    for step in steps:
        optimizer.partition.model(**batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# -- one block is ordinary training -----------------------------------------------------------------------------------


def split_for(cls: type, model: nn.Module) -> tuple[list[str], list[str]]:
    """By hand: what Muon takes (matrices of the transformer layers) and what AdamW takes; other classes take all."""
    names = dict(model.named_parameters())
    if cls is not torch.optim.Muon:
        return list(names), []
    matrices = [name for name, p in names.items() if name.startswith("transformer.h.") and p.ndim == 2]
    return matrices, [name for name in names if name not in matrices]


def plain_optimizers(model: nn.Module, cls: type, keywords: dict[str, Any], *, decay_all: bool) -> list:
    named = dict(model.named_parameters())
    optimizers = []
    others = {key: keywords[key] for key in ("lr", "weight_decay") if key in keywords}
    for (kind, options), names in zip(
        ((cls, keywords), (torch.optim.AdamW, others)), split_for(cls, model), strict=True
    ):
        if not names:
            continue
        if decay_all or "weight_decay" not in inspect.signature(kind).parameters:
            optimizers.append(kind([named[name] for name in names], **options))
            continue
        undecayed = [name for name in names if name.endswith(".bias") or ".ln_" in name]
        groups = [
            {"params": [named[name] for name in names if name not in undecayed]},
            {"params": [named[name] for name in undecayed], "weight_decay": 0.0},
        ]
        optimizers.append(kind([group for group in groups if group["params"]], **options))
    return optimizers


@pytest.mark.parametrize("decay_all", [False, True])
def test_one_block_equals_an_ordinary_training_loop_bit_for_bit(optimizer_class: Class, decay_all: bool, gpt2, batch):
    cls, keywords = optimizer_class
    plain = gpt2().train()
    optimizers = plain_optimizers(plain, cls, keywords, decay_all=decay_all)
    for step in range(4):
        plain(**batch(step)).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    model = gpt2()
    parts = partition(model, num_blocks=1)
    choice = {"undecayed": nothing} if decay_all else {}
    ours = BlockOptimizer(parts, cls, **choice, **keywords)
    with ours.visit(parts[0]):
        train(ours, batch, range(4))
        state = ours.block_state(0)

    assert same_weights(model, plain)
    names = {id(p): name for name, p in plain.named_parameters()}
    expected = {names[id(p)]: entries for optimizer in optimizers for p, entries in optimizer.state.items()}
    expected = {name: {key: v for key, v in entries.items() if v is not None} for name, entries in expected.items()}
    assert same_state(state, expected)
    assert not same_weights(model, gpt2())


# -- three blocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [FP32, BF16_EXACT], ids=lambda precision: precision.name)
def test_only_the_active_block_moves(precision: Precision, gpt2, batch):
    parts = partition(gpt2(), num_blocks=3)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2, precision=precision)
    for block in parts:
        before = weights(parts.model)
        with optimizer.visit(block):
            for step in range(2):
                parts.model(**batch(step)).loss.backward()
                for name, p in parts.model.named_parameters():
                    assert p.requires_grad == (name in block.parameters)
                    assert name in block.parameters or p.grad is None
                optimizer.step()
                optimizer.zero_grad()
        moved = {name for name, value in weights(parts.model).items() if not torch.equal(value, before[name])}
        assert moved == set(block.parameters)
        assert all(p.grad is None and not p.requires_grad for p in parts.model.parameters())


def test_constructing_freezes_the_model(gpt2, batch):
    model = gpt2()
    model(**batch(0)).loss.backward()
    BlockOptimizer(partition(model, num_blocks=3), torch.optim.AdamW, precision=BF16_EXACT)
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


def test_a_visit_that_fails_retires_its_block(gpt2, batch):
    parts = partition(gpt2(), num_blocks=3)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2, precision=BF16_EXACT, state=KeepOnHost())
    with contextlib.suppress(KeyboardInterrupt), optimizer.visit(parts[1]):
        train(optimizer, batch, range(1))
        parts.model(**batch(1)).loss.backward()
        raise KeyboardInterrupt
    assert optimizer.block is None
    assert all(p.grad is None and not p.requires_grad for p in parts.model.parameters())
    assert optimizer.block_state(1) is not None
    with optimizer.visit(parts[2]):
        train(optimizer, batch, range(1))


@pytest.mark.parametrize("precision", [FP32, BF16_EXACT], ids=lambda precision: precision.name)
def test_state_bytes_equal_the_prediction(optimizer_class: Class, precision: Precision, gpt2, batch):
    cls, keywords = optimizer_class
    parts = partition(gpt2(), num_blocks=3)
    optimizer = BlockOptimizer(parts, cls, precision=precision, **keywords)
    for block in parts:
        predicted = optimizer.predicted_state_bytes(block)
        with optimizer.visit(block):
            train(optimizer, batch, range(2))
            assert optimizer.state_bytes() == predicted > 0


def test_adam_keeps_two_moments_and_a_step_count_of_the_active_block(gpt2, batch):
    parts = partition(gpt2(), num_blocks=3)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=1e-3)
    for block in parts:
        with optimizer.visit(block):
            train(optimizer, batch, range(1))
            assert optimizer.state_bytes() == 2 * 4 * block.num_parameters + 4 * len(block.parameters)


def test_the_prediction_does_not_need_the_device_of_the_model(gpt2):
    optimizer = BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW, capturable=True)
    block = optimizer.partition[1]
    assert optimizer.predicted_state_bytes(block) == 2 * 4 * block.num_parameters + 4 * len(block.parameters)


def test_muon_takes_the_hidden_matrices_and_others_take_all_else(gpt2):
    parts = partition(gpt2(), num_blocks=1)
    others = (torch.optim.SGD, {"lr": 0.5})
    optimizer = BlockOptimizer(parts, torch.optim.Muon, lr=0.1, others=others)
    with optimizer.visit(parts[0]):
        muon, *others_groups = optimizer.param_groups
        names = {id(p): name for name, p in parts.model.named_parameters()}
        taken = {names[id(p)] for p in muon["params"]}
        assert taken == {f"transformer.h.{i}.{m}.weight" for i in (0, 1) for m in MATRICES}
        assert {group["lr"] for group in others_groups} == {0.5}
        assert sum(len(group["params"]) for group in (muon, *others_groups)) == len(names)


MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


# -- state between visits ---------------------------------------------------------------------------------------------


STORES = {"drop": lambda folder: Drop(), "host": lambda folder: KeepOnHost(), "disk": KeepOnDisk}


@pytest.fixture(params=STORES.values(), ids=list(STORES))
def make_store(request: pytest.FixtureRequest):
    return request.param


def test_state_after_reactivation_is_the_state_at_retirement(optimizer_class: Class, make_store, tmp_path, gpt2, batch):
    cls, keywords = optimizer_class
    parts = partition(gpt2(), num_blocks=3)
    optimizer = BlockOptimizer(parts, cls, state=make_store(tmp_path), **keywords)
    with optimizer.visit(parts[0]):
        fresh = optimizer.block_state(0)  # Adagrad, alone, has state before its first step
        train(optimizer, batch, range(2))
        retired = optimizer.block_state(0)
    with optimizer.visit(parts[1]):
        train(optimizer, batch, range(2, 3))
    dropped = isinstance(optimizer.store, Drop)
    assert same_state(optimizer.block_state(0), None if dropped else retired)
    with optimizer.visit(parts[0]):
        assert same_state(optimizer.block_state(0), fresh if dropped else retired)
        train(optimizer, batch, range(3, 4))


def test_state_on_disk_trains_as_state_on_the_host(tmp_path, gpt2, batch):
    models = []
    for store in (KeepOnHost(), KeepOnDisk(tmp_path)):
        parts = partition(gpt2(), num_blocks=3)
        optimizer = BlockOptimizer(parts, torch.optim.NAdam, lr=1e-2, state=store)
        for visit in range(6):
            with optimizer.visit(parts[visit % 3]):
                train(optimizer, batch, range(2 * visit, 2 * visit + 2))
        models.append(parts.model)
    assert same_weights(*models)


def test_the_folder_of_an_older_run_is_not_used(tmp_path, gpt2, batch):
    def first_visit() -> nn.Module:
        parts = partition(gpt2(), num_blocks=3)
        optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2, state=KeepOnDisk(tmp_path))
        with optimizer.visit(parts[0]):
            train(optimizer, batch, range(3))
        return parts.model

    assert same_weights(first_visit(), first_visit())


# -- checkpoints ------------------------------------------------------------------------------------------------------


def five_visits(optimizer: BlockOptimizer, batch, *, stop_at: int | None = None, start: int = 0, span: Span = "block"):
    """Visits of 2 steps to blocks 0, 1, 2, 0, 1. At step `stop_at`, in mid-visit, returns what a checkpoint would hold;
    `start`, in mid-visit, continues from there."""
    trained = Cyclic(visit=Duration.steps(2), span=span).trained(optimizer.partition)
    for visit in range(start // 2, 5):
        with optimizer.visit(trained[visit % 3]):
            for step in range(max(start, 2 * visit), 2 * visit + 2):
                if step == stop_at:
                    state = optimizer.partition.model.state_dict()
                    return {name: value.clone() for name, value in state.items()}, optimizer.state_dict()
                train(optimizer, batch, range(step, step + 1))
    return None


@pytest.fixture(scope="module")
def uninterrupted_runs(gpt2, batch, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., BlockOptimizer]:
    """`uninterrupted_runs(cls, precision, span, make_store)`: the optimizer after `five_visits`, trained once."""

    @cache
    def trained(cls, precision: Precision, span: Span, make_store) -> BlockOptimizer:
        parts, store = partition(gpt2(), num_blocks=3), make_store(tmp_path_factory.mktemp("uninterrupted"))
        optimizer = BlockOptimizer(parts, cls, lr=1e-2, precision=precision, state=store)
        five_visits(optimizer, batch, span=span)
        return optimizer

    return trained


@pytest.mark.parametrize("precision", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("cls", [torch.optim.NAdam, pytest.param(torch.optim.Muon, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("stop_at", "span"),
    [pytest.param(1, "block", marks=pytest.mark.slow), (7, "block"), pytest.param(3, "suffix", marks=pytest.mark.slow)],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(  # noqa: PLR0917
    cls, precision: Precision, stop_at: int, span: Span, make_store, tmp_path, gpt2, batch, uninterrupted_runs
):
    """It is stopped in the first visit, when no other block has state; in the fourth, when all have; and in a visit to
    two blocks."""

    def make() -> BlockOptimizer:
        parts = partition(gpt2(), num_blocks=3)
        return BlockOptimizer(parts, cls, lr=1e-2, precision=precision, state=make_store(tmp_path))

    uninterrupted = uninterrupted_runs(cls, precision, span, make_store)
    stopped = make()
    at_stop, saved = five_visits(stopped, batch, stop_at=stop_at, span=span) or ({}, {})
    # The run continued after its checkpoint before it was killed; a store on disk still has the later states.
    stopped.load_state_dict(saved)
    five_visits(stopped, batch, start=stop_at, span=span)

    resumed = make()
    for block in resumed.partition:
        resumed.load_block_weights(block.index, at_stop)
    resumed.load_state_dict(saved)
    assert resumed.state_dict()["active"] == saved["active"]
    five_visits(resumed, batch, start=stop_at, span=span)

    assert resumed.progress() == uninterrupted.progress()
    for block in uninterrupted.partition:
        mine, theirs = resumed.block_weights(block.index), uninterrupted.block_weights(block.index)
        assert all(torch.equal(mine[name], theirs[name]) for name in block.parameters)
        assert same_state(resumed.block_state(block.index), uninterrupted.block_state(block.index))
        left, expected = resumed.block_low_bits(block.index), uninterrupted.block_low_bits(block.index)
        assert left.keys() == expected.keys()
        assert all(torch.equal(left[name], expected[name]) for name in expected)


def test_the_state_of_blocks_trained_together_is_stored_separately(make_store, tmp_path, gpt2, batch):
    """Visits to block 1 or 2 continue with the state that a visit to both has left, and the other way round."""
    parts = partition(gpt2(), num_blocks=3)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2, state=make_store(tmp_path), precision=BF16_EXACT)
    with optimizer.visit(parts.suffix(1)):
        train(optimizer, batch, range(2))
        expected = {index: optimizer.block_state(index) for index in (1, 2)}
        assert optimizer.progress() == {"active": [1, 2], "steps": 2, "changed_at": [0, 2, 2]}
        assert optimizer.block_low_bits(1).keys() == parts[1].parameters.keys()
    kept = not isinstance(optimizer.store, Drop)
    for index, state in expected.items():
        assert state is not None
        assert state.keys() == parts[index].parameters.keys()
        with optimizer.visit(parts[index]):
            assert same_state(optimizer.block_state(index), state if kept else {})
    with optimizer.visit(parts.suffix(0)):
        assert same_state(optimizer.block_state(2), expected[2] if kept else {})


def test_a_union_of_another_partition_is_refused(gpt2):
    optimizer = BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW)
    other = partition(gpt2(), num_blocks=3).suffix(1)
    with pytest.raises(ConfigError, match="is not a block of this optimizer's partition"), optimizer.visit(other):
        pass


def saved_in_mid_visit(gpt2, batch, **options: Any) -> tuple[BlockOptimizer, dict[str, Any]]:
    parts = partition(gpt2(), num_blocks=3)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2, **options)
    with optimizer.visit(parts[1]):
        train(optimizer, batch, range(2))
        return optimizer, optimizer.state_dict()


def test_a_loaded_state_can_be_saved_again_at_once(gpt2, batch):
    _, saved = saved_in_mid_visit(gpt2, batch)
    again = BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW, lr=1e-2)
    again.load_state_dict(saved)
    once_more = again.state_dict()
    assert {key: once_more[key] for key in ("active", "steps", "changed_at")} == {
        "active": [1],
        "steps": 2,
        "changed_at": [0, 2, 0],
    }
    assert once_more["blocks"].keys() == {1}
    assert same_state(once_more["blocks"][1], saved["blocks"][1])


def test_a_loaded_state_is_pending_until_its_block_is_visited(gpt2, batch):
    """Another block may be visited first."""
    _, saved = saved_in_mid_visit(gpt2, batch)
    optimizer = BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW, lr=1e-2)
    optimizer.load_state_dict(saved)
    with optimizer.visit(optimizer.partition[0]):
        train(optimizer, batch, range(1))
    with optimizer.visit(optimizer.partition[1]):
        assert same_state(optimizer.block_state(1), saved["blocks"][1])
    with optimizer.visit(optimizer.partition[1]):
        assert optimizer.block_state(1) == {}  # dropped, as the store says


def test_loading_forgets_the_steps_taken_since(make_store, tmp_path, gpt2, batch):
    parts = partition(gpt2(), num_blocks=3)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2, state=make_store(tmp_path))
    saved = optimizer.state_dict()
    with optimizer.visit(parts[2]):
        train(optimizer, batch, range(1))
    optimizer.load_state_dict(saved)
    assert optimizer.progress() == {"active": [], "steps": 0, "changed_at": [0, 0, 0]}
    assert [optimizer.block_state(block.index) for block in parts] == [None, None, None]


def test_further_training_does_not_change_a_saved_state(gpt2, batch):
    optimizer, saved = saved_in_mid_visit(gpt2, batch, state=KeepOnHost())
    moments = {name: entries["exp_avg"].clone() for name, entries in saved["blocks"][1].items()}
    optimizer.load_state_dict(saved)
    with optimizer.visit(optimizer.partition[1]):
        train(optimizer, batch, range(2))
    assert all(torch.equal(saved["blocks"][1][name]["exp_avg"], value) for name, value in moments.items())


def test_loading_a_state_of_another_partition_is_refused(gpt2, batch):
    optimizer, saved = saved_in_mid_visit(gpt2, batch, state=KeepOnHost())
    two = BlockOptimizer(partition(gpt2(), num_blocks=2), torch.optim.AdamW)
    with pytest.raises(CheckpointError, match="the saved optimizer has 3 blocks, this partition has 2"):
        two.load_state_dict(saved)
    moved = {**saved, "blocks": {2: saved["blocks"][1]}}
    name = min(saved["blocks"][1])
    with pytest.raises(CheckpointError, match=rf"the saved block 2 holds '{name}', which is not in this block"):
        optimizer.load_state_dict(moved)
    assert optimizer.block_state(1) is not None  # nothing was touched


@pytest.mark.parametrize(("before", "after"), [(FP32, BF16_EXACT), (BF16_EXACT, FP32)])
def test_loading_a_state_of_another_precision_is_refused(before: Precision, after: Precision, gpt2, batch):
    """Without its low bits a bf16 model would have inexact masters, and nobody would notice."""
    _, saved = saved_in_mid_visit(gpt2, batch, precision=before)
    other = BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW, precision=after)
    with pytest.raises(CheckpointError, match=f"precision '{after.name}' needs .* with the precision it was saved"):
        other.load_state_dict(saved)


# -- precision --------------------------------------------------------------------------------------------------------


class FixedGradient(nn.Module):
    """sum(w * g): the gradient is a constant, exact in bf16."""

    def __init__(self, size: int = 64):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) * 0.02)
        self.gradient = torch.randn(size, size).sign()

    def forward(self) -> Tensor:
        return (self.weight * self.gradient).sum()


class FixedGradients(nn.Module):
    """Two layers of that kind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(FixedGradient() for _ in range(2))

    def forward(self) -> Tensor:
        return torch.stack([layer() for layer in self.layers]).sum()


def fixed_gradients() -> tuple[FixedGradients, Partition]:
    torch.manual_seed(2)
    model = FixedGradients()
    return model, partition(model, num_blocks=2, layers={"0": ["layers.0"], "1": ["layers.1"]})


RATE, VISITS, STEPS = 1e-6, 10, 50


@cache
def ten_visits(precision: Precision, frozen: WeightLocation) -> BlockOptimizer:
    model, parts = fixed_gradients()
    optimizer = BlockOptimizer(parts, torch.optim.SGD, lr=RATE, precision=precision, frozen=frozen)
    for _ in range(VISITS):
        for block in parts:
            with optimizer.visit(block):
                for _ in range(STEPS):
                    model().backward()
                    optimizer.step()
                    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("frozen", [OnDevice(), OnHost()], ids=["device", "host"])
@pytest.mark.parametrize("precision", [BF16_EXACT, INT8, NF4], ids=lambda precision: precision.name)
def test_no_movement_is_lost_at_a_switch(precision: Precision, frozen: WeightLocation):
    """This holds for quantized frozen weights too, because their masters are not quantized."""
    expected, optimizer = ten_visits(FP32, OnDevice()), ten_visits(precision, frozen)
    for index in range(2):
        (half,), (low_bits,) = optimizer.block_weights(index).values(), optimizer.block_low_bits(index).values()
        (in_fp32,) = expected.block_weights(index).values()
        assert half.dtype == torch.bfloat16
        assert torch.equal(join(half, low_bits), in_fp32)  # bit for bit


def test_rebuilding_masters_loses_a_third_of_the_movement():
    """BAdam rebuilds the fp32 master from bf16 at each switch: at learning rate 1e-6 many weights never move."""
    start, optimizer = fixed_gradients()[0], ten_visits(BF16, OnDevice())
    for index, layer in enumerate(start.layers):
        assert isinstance(layer, FixedGradient)
        assert optimizer.block_low_bits(index) == {}
        (weight,) = optimizer.block_weights(index).values()
        begun = layer.weight.detach().bfloat16()
        kept = ((begun - weight).float() * layer.gradient).mean().item() / (RATE * VISITS * STEPS)
        assert (weight == begun).float().mean().item() > 0.4  # never moved
        assert 0.6 < kept < 0.7


def test_micro_batches_add_up_in_fp32():
    """256 gradients of 2^-9 after one of 1: in bf16 each of them is lost."""
    in_bf16 = torch.ones((), dtype=torch.bfloat16)
    for _ in range(256):
        in_bf16 += 2**-9
    assert in_bf16.item() == 1.0

    model, parts = fixed_gradients()
    first = model.layers[0]
    assert isinstance(first, FixedGradient)
    first.gradient = torch.ones(64, 64)
    optimizer = BlockOptimizer(parts, torch.optim.SGD, lr=RATE, precision=BF16_EXACT)
    with optimizer.visit(parts[0]):
        model().backward()
        for _ in range(256):
            (model() * 2**-9).backward()
        (gradient,) = optimizer.gradients()
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, torch.full((64, 64), 1.5))
        assert all(weight.grad is None for weight in model.parameters())  # no second copy in bf16
        optimizer.zero_grad()
        assert optimizer.gradients() == []


def test_a_model_in_bf16_keeps_its_values(gpt2):
    model = gpt2().bfloat16()
    before = weights(model)
    optimizer = BlockOptimizer(partition(model, num_blocks=3), torch.optim.AdamW, precision=BF16_EXACT)
    with optimizer.visit(optimizer.partition[0]):
        pass
    after = weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


# -- parameters without gradient --------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two experts of which only the first is chosen."""

    def __init__(self):
        super().__init__()
        self.chosen, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.chosen(x)


@pytest.mark.parametrize("precision", [FP32, BF16_EXACT], ids=lambda precision: precision.name)
def test_an_active_parameter_without_gradient_is_left_as_it_is(precision: Precision):
    """BAdam aborts at an expert that no token chose."""
    model = nn.Sequential(Experts(), nn.Linear(8, 1))
    parts = partition(model, num_blocks=2)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=0.1, weight_decay=0.5, precision=precision)
    before = weights(model)
    with optimizer.visit(parts[0]):
        for _ in range(3):
            model(torch.ones(2, 8, dtype=precision.compute)).sum().backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert (optimizer.block_state(0) or {}).keys() == {"0.chosen.weight", "0.chosen.bias"}
    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert moved == {"0.chosen.weight", "0.chosen.bias"}


# -- inside a visit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_clipping_equals_that_of_pytorch(max_norm: float, gpt2, batch):
    plain = gpt2().train()
    plain(**batch(0)).loss.backward()
    parts = partition(gpt2(), num_blocks=1)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW)
    with optimizer.visit(parts[0]):
        parts.model(**batch(0)).loss.backward()
        named = dict(plain.named_parameters())
        in_our_order = [named[name] for name in parts[0].parameters]  # a norm of norms depends on their order
        expected = torch.nn.utils.clip_grad_norm_(in_our_order, max_norm)
        assert torch.equal(optimizer.clip_grad_norm(max_norm), expected)
        assert expected > 0.01
        for name, p in named.items():
            mine, theirs = parts.model.get_parameter(name).grad, p.grad
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs)


def test_clipping_reaches_the_gradients_of_masters():
    model, parts = fixed_gradients()
    optimizer = BlockOptimizer(parts, torch.optim.SGD, lr=RATE, precision=BF16_EXACT)
    with optimizer.visit(parts[0]):
        model().backward()
        assert optimizer.clip_grad_norm().item() == 64.0  # sqrt(4096 * 1)
        assert optimizer.clip_grad_norm(6.4).item() == 64.0
        assert optimizer.clip_grad_norm().item() == pytest.approx(6.4, rel=1e-5)


def test_learning_rates_are_scaled_relative_to_their_first_values(gpt2):
    parts = partition(gpt2(), num_blocks=3)
    optimizer = BlockOptimizer(parts, torch.optim.Muon, lr=0.2, others=(torch.optim.AdamW, {"lr": 0.01}))
    for block in parts:
        with optimizer.visit(block):
            began = [group["lr"] for group in optimizer.param_groups]
            for factor in (0.5, 0.25, 1.0):
                optimizer.scale_learning_rate(factor)
                assert [group["lr"] for group in optimizer.param_groups] == [rate * factor for rate in began]


def test_visits_do_not_nest(gpt2):
    parts = partition(gpt2(), num_blocks=3)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW)
    with optimizer.visit(parts[0]):
        with (
            pytest.raises(ConfigError, match=r"Block\(1: .*cannot be activated: the visit to Block\(0: .*still open"),
            optimizer.visit(parts[1]),
        ):
            pass
        assert optimizer.block is parts[0]
        assert all(p.requires_grad for p in parts[0].parameters.values())


def blocks_of_others(parts: Partition) -> list[Block]:
    return [parts.whole, partition(parts.model, num_blocks=3)[0]]


def test_a_block_of_another_partition_is_refused(gpt2):
    parts = partition(gpt2(), num_blocks=2)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW)
    for block in blocks_of_others(parts):
        with (
            pytest.raises(ConfigError, match=r"is not a block of this optimizer's partition; visit one of Partition"),
            optimizer.visit(block),
        ):
            pass


def test_wrong_kinds_of_arguments_are_refused(gpt2) -> None:
    make: Any = BlockOptimizer
    with pytest.raises(ConfigError, match=r"a GPT2LMHeadModel is no partition: give bt\.partition"):
        make(gpt2(), torch.optim.AdamW)
    with pytest.raises(ConfigError, match="'AdamW' is no optimizer class: give one such as"):
        make(partition(gpt2(), num_blocks=2), "AdamW")


@pytest.mark.parametrize("use", ["step", "zero_grad", "gradients", "clip_grad_norm", "state_bytes"])
def test_methods_of_a_visit_are_refused_outside_of_it(use: str, gpt2):
    optimizer = BlockOptimizer(partition(gpt2(), num_blocks=3), torch.optim.AdamW)
    with pytest.raises(ConfigError, match=r"no block is active: use 'with optimizer.visit\(block\):'"):
        getattr(optimizer, use)()


def test_loading_inside_a_visit_is_refused(gpt2, batch):
    optimizer, saved = saved_in_mid_visit(gpt2, batch)
    with (
        optimizer.visit(optimizer.partition[0]),
        pytest.raises(ConfigError, match=r"Block\(0: .* is active: leave its visit before loading"),
    ):
        optimizer.load_state_dict(saved)


def test_every_store_has_no_state_at_first(tmp_path):
    stores: list[StateStore] = [make(tmp_path) for make in STORES.values()]
    assert [store.get(0) for store in stores] == [None, None, None]


# -- blocks smaller than a layer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [FP32, BF16_EXACT], ids=lambda precision: precision.name)
def test_rows_of_a_matrix_move_as_they_do_in_the_whole_matrix(gpt2, batch, precision: Precision):
    """The embedding (64 x 32, tied) in four ranges of rows: a visit to one moves its rows as training it whole does."""
    finer, whole = partition(gpt2(), largest=600), partition(gpt2(), patterns=[["embedding"], ["*"]])
    name = "transformer.wte.weight"
    block = next(block for block in finer if block.rows.get(name) == range(16, 32))
    optimizers = [BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2, precision=precision) for parts in (finer, whole)]
    trained = []
    for optimizer, active in zip(optimizers, (block, whole[0]), strict=True):
        before = weights(optimizer.partition.model)
        with optimizer.visit(active):
            train(optimizer, batch, range(1))
        trained.append((before, weights(optimizer.partition.model)))
    (before, after), (_, expected) = trained
    assert not torch.equal(after[name][16:32], before[name][16:32])
    assert torch.equal(after[name][16:32], expected[name][16:32])
    after[name][16:32] = before[name][16:32]
    assert all(torch.equal(after[key], before[key]) for key in before)
    if precision.has_master:
        assert torch.equal(
            optimizers[0].block_low_bits(block.index)[name], optimizers[1].block_low_bits(0)[name][16:32]
        )


def test_moments_of_a_block_of_rows_have_its_rows_only(gpt2, batch):
    parts = partition(gpt2(), largest=600)
    optimizer = BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2)
    for block in parts:
        with optimizer.visit(block):
            train(optimizer, batch, range(1))
            assert optimizer.state_bytes() == optimizer.predicted_state_bytes(block)
            assert optimizer.state_bytes() == 8 * block.num_parameters + 4 * len(block.parameters)

"""Bugs of other tools that must not happen here. Each test says whose it was and what it did, in figures if known.

Most were found in BAdam 1.2 and LISA by running small models; some in LOMO, HiFT, MegaTrain and the Hugging Face
Trainer by reading their sources; the last ones are traps of PyTorch itself.
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
import random
import shutil
import signal
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import blocktrain as bt
from blocktrain import reference
from blocktrain.data.token_rows import TokenRows
from blocktrain.errors import ConfigError, Interrupted
from blocktrain.memory.flops import count_flops
from blocktrain.optim.factory import nothing
from blocktrain.optim.precision import join, upper_half
from blocktrain.records.run_records import Record, Step, VisitStart
from blocktrain.train.checkpoint import checkpoints, load_checkpoint
from blocktrain.train.context import build

from . import tiny_models
from .run_events import events_of
from .tiny_models import LLAMA_SIZES, checkpoint_activations, llama

TOKENS = torch.arange(32).reshape(2, 16) % 61
UNEQUAL = [["embedding"], ["transformer.h.0"], ["transformer.h.[1-3]", "head"]]


def gpt2(layers: int = 4, **settings: Any) -> nn.Module:
    """Without dropout."""
    return tiny_models.gpt2(layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **settings)


def mixtral() -> nn.Module:
    """Four experts. The router scores them equally, so that one gets every token and the others none."""
    model: Any = hf.MixtralForCausalLM(
        hf.MixtralConfig(num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=1, **LLAMA_SIZES)
    )
    for layer in model.model.layers:
        nn.init.zeros_(layer.mlp.gate.weight)
    return model


def steps(optimizer: bt.BlockOptimizer, count: int) -> None:
    """`count` steps on the active block, always on the same tokens."""
    for _ in range(count):
        optimizer.partition.model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three visits of four steps; tests must not change it."""
    return bt.run(tiny(), tmp_path_factory.mktemp("finished") / "run").path


@pytest.fixture(scope="module")
def interrupted(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a run, stopped by a signal in the middle of the second visit; tests must not change it."""

    def stop(record: Record) -> None:
        if isinstance(record, Step) and record.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    folder = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.raises(Interrupted):
        bt.run(tiny(), folder, listeners=[stop])
    return folder


# -- 1: masters -------------------------------------------------------------------------------------------------------


def test_slow_movement_survives_the_switch_of_blocks():
    """BAdam built the fp32 master of a block from its bf16 weights at each switch. At learning rate 1e-6 and 100 steps
    a visit, 63 % of the movement survived a visit, and 53 % of the weights never moved. Here all of it survives."""
    model = gpt2(1, initializer_range=0.07).to(torch.bfloat16)  # as loaded: every master starts on a bf16 value
    before = {name: value.float() for name, value in weights_of(model).items()}
    parts = bt.partition(model, num_blocks=2)
    optimizer = bt.BlockOptimizer(parts, torch.optim.AdamW, lr=1e-6, weight_decay=0.0, precision=bt.BF16_EXACT)

    def masters() -> dict[str, Tensor]:  # the optimizer's groups hold them: decayed ones first, then the others
        shapes = Counter(parameter.shape for parameter in parts[0].parameters.values())
        found = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        assert Counter(p.shape for p in found) == shapes
        return {str(index): p for index, p in enumerate(found)}

    with optimizer.visit(parts[0]):
        steps(optimizer, 100)
        at_the_end = masters()
    with optimizer.visit(parts[1]):
        steps(optimizer, 1)
    with optimizer.visit(parts[0]):
        assert_equal(masters(), at_the_end)

    # And this is what rebuilding them from the model's own weights would have thrown away:
    left = optimizer.block_low_bits(0)
    moved = torch.cat([(join(p.data, left[n]) - before[n]).flatten() for n, p in parts[0].parameters.items()])
    naive = torch.cat([(p.data.float() - before[n]).flatten() for n, p in parts[0].parameters.items()])
    assert (moved != 0).float().mean() > 0.9
    assert (naive != 0).float().mean() < 0.6
    assert (naive * moved.sign()).sum() / moved.abs().sum() < 0.75


# -- 2: resuming ------------------------------------------------------------------------------------------------------


def test_resuming_continues_in_the_same_block_with_its_own_moments():
    """BAdam's `state_dict` was its base optimizer's: it knew neither the block nor the step. Resuming began at step 0
    in the first block, gave moments to other parameters by their place in a list, and crashed on unequal blocks."""

    def start() -> bt.BlockOptimizer:
        torch.manual_seed(0)
        parts = bt.partition(gpt2(), patterns=UNEQUAL)
        assert len({block.num_parameters for block in parts}) == 3
        return bt.BlockOptimizer(parts, torch.optim.AdamW, lr=0.01, state=bt.KeepOnHost())

    def train(optimizer: bt.BlockOptimizer, visits: list[tuple[int, int]]) -> bt.BlockOptimizer:
        for block, count in visits:
            with optimizer.visit(optimizer.partition[block]):
                steps(optimizer, count)
        return optimizer

    whole = train(start(), [(0, 3), (1, 3), (2, 3), (0, 3)])

    first = train(start(), [(0, 3)])
    with first.visit(first.partition[1]):
        steps(first, 2)
        saved = copy.deepcopy(first.state_dict())
        weights = copy.deepcopy(first.partition.model.state_dict())
    assert (saved["active"], saved["steps"]) == ([1], 5)
    assert saved["blocks"][1].keys() == first.partition[1].parameters.keys()

    second = start()
    second.partition.model.load_state_dict(weights)
    second.load_state_dict(saved)
    train(second, [(1, 1), (2, 3), (0, 3)])
    assert second.steps == whole.steps
    assert_equal(weights_of(second.partition.model), weights_of(whole.partition.model))


def test_a_resumed_run_takes_the_next_step_in_the_same_visit(interrupted: Path, tmp_path: Path):
    """BAdam's block and step started again from zero in every new process."""
    records: list[Record] = []
    bt.resume(shutil.copytree(interrupted, tmp_path / "run"), listeners=[records.append])
    taken = [(record.step, record.block) for record in records if isinstance(record, Step)]
    assert taken == [(7, 1), (8, 1), (9, 2), (10, 2), (11, 2), (12, 2)]


# -- 3: weight decay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_weight_decay_has_the_given_value_and_leaves_out_norms(make, weight_decay: float):
    """BAdam's `{"weight_decay": 0.0, **defaults}` turned both 0.0 and 0.1 into 0.01. It also decayed norms, because it
    tested whether a *tensor* was an instance of LayerNorm. With zero gradients AdamW does nothing but decay."""
    model = make()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1.0)
    parts = bt.partition(model, num_blocks=2)
    optimizer = bt.BlockOptimizer(parts, torch.optim.AdamW, lr=0.5, weight_decay=weight_decay)
    for block in parts:
        with optimizer.visit(block):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
    for name, parameter in model.named_parameters():
        expected = 1 - 0.5 * weight_decay if parameter.ndim == 2 else 1.0  # the others are norms and biases
        assert torch.equal(parameter, torch.full_like(parameter, expected)), name


# -- 4: activation checkpointing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_activation_checkpointing_changes_no_gradient(make, reentrant: bool):
    """BAdam with reentrant checkpointing failed: "element 0 of tensors does not require grad". The usual cure is to
    make the embedding's output require a gradient (Hugging Face does so by itself), which differentiates the whole
    frozen prefix. Without it, with the head active, PyTorch 2.13 only warns and gives the checkpointed layers no
    gradients."""
    parts = bt.partition(make(), num_blocks=3)
    optimizer = bt.BlockOptimizer(parts, torch.optim.SGD, lr=0.0)
    embedding: Any = parts.model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    differentiated: list[bool] = []

    def gradients(block: bt.Block) -> dict[str, Tensor]:
        with optimizer.visit(block):
            handle = embedding.register_forward_hook(lambda *seen: differentiated.append(seen[-1].requires_grad))
            parts.model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
            handle.remove()
            return {name: p.grad.clone() for name, p in parts.model.named_parameters() if p.grad is not None}

    without = [gradients(block) for block in parts]
    checkpoint_activations(parts.model, reentrant=reentrant)
    for block, expected in zip(parts, without, strict=True):
        assert expected.keys() == block.parameters.keys()
        assert_equal(gradients(block), expected)
    assert differentiated == [True, False, False] * 2


# -- 5: names ---------------------------------------------------------------------------------------------------------


class TwoTowers(nn.Module):
    """Twelve text layers above three vision layers; both lists are called `layers`."""

    def __init__(self):
        super().__init__()
        self.vision_model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))})
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(12))


def test_blocks_are_found_by_whole_names():
    """BAdam found blocks by the text `layers.`. It crashed on GPT-2, whose list is called `h`; its block `layers.1`
    took `layers.10` and `layers.11` too, and `layers.1.` also matched `vision_model.layers.1.`."""
    paths = [f"vision_model.layers.{index}" for index in range(3)] + [f"layers.{index}" for index in range(12)]
    groups = [["vision_model.*", "layers.0"], ["layers.1"], ["layers.*"]]
    parts = bt.partition(TwoTowers(), layers={path: [path] for path in paths}, patterns=groups)
    assert set(parts[1].parameters) == {"layers.1.weight", "layers.1.bias"}
    assert [len(block.layers) for block in parts] == [4, 1, 10]

    twelve = bt.partition(gpt2(12), patterns=[["embedding", "transformer.h.0"], ["transformer.h.1"], ["*"]])
    optimizer = bt.BlockOptimizer(twelve, torch.optim.SGD, lr=0.1)
    with optimizer.visit(twelve[1]):
        names = trainable(twelve.model)
    assert len(names) == 12
    assert all(name.startswith("transformer.h.1.") for name in names)


# -- 6: gradients, steps and order ------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Three experts in a list; a token's sign chooses between the first two, and none chooses the third."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x[x[:, 0] > 0]).sum() + self.experts[1](x[x[:, 0] <= 0]).sum()


@pytest.mark.parametrize("precision", [bt.FP32, bt.BF16_EXACT], ids=["fp32", "bf16-exact"])
def test_an_expert_that_no_token_chose_is_left_as_it_is(precision: bt.Precision):
    """BAdam asserted that every active parameter has a gradient: a mixture of experts aborted at the first step in
    which one had nothing to do."""
    model = nn.Sequential(nn.Linear(4, 4), Experts())
    before = weights_of(model)
    parts = bt.partition(model, num_blocks=2)
    optimizer = bt.BlockOptimizer(parts, torch.optim.AdamW, lr=0.1, precision=precision, state=bt.KeepOnHost())
    inputs = torch.randn(16, 4).to(precision.compute)
    for _ in range(2):  # the second time with the stored moments of the chosen experts
        with optimizer.visit(parts[1]):
            model(inputs).backward()
            assert len(optimizer.gradients()) == 4
            assert optimizer.clip_grad_norm(1.0) > 1
            optimizer.step()
            optimizer.zero_grad()
    moved = {name for name, value in weights_of(model).items() if not torch.equal(value, before[name].to(value.dtype))}
    assert moved == {f"1.experts.{index}.{kind}" for index in (0, 1) for kind in ("weight", "bias")}


def test_a_mixture_of_experts_trains_block_by_block():
    """As above with Mixtral, whose experts are slices of one tensor: all but the chosen one keep their weights."""
    parts = bt.partition(mixtral(), num_blocks=3)
    before = weights_of(parts.model)
    optimizer = bt.BlockOptimizer(parts, torch.optim.AdamW, lr=0.01, weight_decay=0.0, state=bt.KeepOnHost())
    for visit in bt.Cyclic(visit=bt.Duration.steps(2), sweeps=2).visits(parts):
        with optimizer.visit(visit.block):
            steps(optimizer, 2)
    for name, after in weights_of(parts.model).items():
        if ".experts." in name:
            changed = [not torch.equal(a, b) for a, b in zip(after, before[name], strict=True)]
            assert sorted(changed) == [False, False, False, True], name


def test_every_visit_has_all_its_steps(tiny, tmp_path: Path):
    """BAdam switched before the K-th step in the first block, which got K - 1 steps."""
    bt.run(tiny("schedule.sweeps=2", "schedule.order=shuffled"), tmp_path / "run")
    taken = Counter(event["visit"] for event in events_of(tmp_path / "run", "step"))
    assert taken == dict.fromkeys(range(6), 4)
    context = build(tiny(), tmp_path)
    load_checkpoint(checkpoints(tmp_path / "run" / "checkpoints")[-1], context.partition, context.optimizer)
    for block in context.partition:  # Adam's own count goes on in the second visit
        state = context.optimizer.block_state(block.index)
        assert state is not None
        assert {int(entries["step"]) for entries in state.values()} == {8}


def test_gradients_of_micro_batches_add_up_in_fp32():
    """BAdam added them in bf16, where 256 + 1 is 256. Here each of 400 micro-batches has a gradient of one."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    parts = bt.partition(model, num_blocks=2)
    optimizer = bt.BlockOptimizer(parts, torch.optim.SGD, lr=0.1, precision=bt.BF16_EXACT)
    with optimizer.visit(parts[1]):
        for _ in range(400):
            model.get_parameter("1.weight").sum().backward()
        (gradient,) = optimizer.gradients()
        assert gradient.dtype == torch.float32
        assert gradient.item() == 400
        assert model.get_parameter("1.weight").grad is None


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled", [2, 0, 1, 0]])
def test_any_order_can_start_anywhere(order):
    """BAdam's fixed and random orders crashed when a first block was given, which a resumed run needs."""
    parts = bt.partition(gpt2(), num_blocks=3)
    schedule = bt.Cyclic(visit=bt.Duration.steps(1), sweeps=4, order=order)

    def listed(start: int) -> list[tuple[int, int, int]]:
        return [(visit.index, visit.sweep, visit.block.index) for visit in schedule.visits(parts, start=start)]

    for start in range(len(listed(0)) + 1):
        assert listed(start) == listed(0)[start:]


def test_ranks_draw_the_same_order_whatever_their_random_state():
    """BAdam drew the next block from each process's global random state: ranks then train different blocks."""
    parts = bt.partition(gpt2(), num_blocks=3)

    def drawn(rank: int) -> list[int]:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(rank)
        schedule = bt.Cyclic(visit=bt.Duration.steps(1), sweeps=8, order="shuffled", seed=7)
        return [visit.block.index for visit in schedule.visits(parts)]

    assert drawn(0) == drawn(1)
    assert len({tuple(drawn(0)[start : start + 3]) for start in range(0, 24, 3)}) > 1


# -- 7: the last update -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_visit", [1, 2])
def test_the_last_update_of_a_block_is_not_lost(steps_per_visit: int):
    """BAdam under ZeRO-3 switched blocks before the partitioned weights had been written back: each block's last
    update was lost. In a visit of one step that is the only one. Compared with Algorithm 1 written plainly."""
    torch.manual_seed(0)
    plain = gpt2()
    parts = bt.partition(copy.deepcopy(plain), num_blocks=3)
    optimizer = bt.BlockOptimizer(parts, torch.optim.AdamW, lr=0.01, undecayed=nothing)
    for visit in bt.Cyclic(visit=bt.Duration.steps(steps_per_visit), sweeps=2).visits(parts):
        with optimizer.visit(visit.block):
            steps(optimizer, steps_per_visit)

    def batches() -> Iterator[dict[str, Tensor]]:
        while True:
            yield {"input_ids": TOKENS, "labels": TOKENS}

    submodels = [list(block.modules()) for block in bt.partition(plain, num_blocks=3)]
    reference.train(
        plain, submodels, batches(), lambda p: torch.optim.AdamW(p, lr=0.01), sweeps=2, steps_per_visit=steps_per_visit
    )
    assert_equal(weights_of(parts.model), weights_of(plain))


def test_the_last_update_of_a_block_is_not_lost_with_masters():
    """As above with bf16-exact, compared with masters that the test keeps by itself."""
    torch.manual_seed(0)
    plain = gpt2()
    parts = bt.partition(copy.deepcopy(plain), num_blocks=2)
    optimizer = bt.BlockOptimizer(parts, torch.optim.SGD, lr=0.01, precision=bt.BF16_EXACT)

    masters = {name: nn.Parameter(value) for name, value in weights_of(plain).items()}
    plain.to(torch.bfloat16)
    by_name = dict(plain.named_parameters())
    for name, parameter in by_name.items():
        parameter.data = upper_half(masters[name].data)
    for block in [*parts, *parts]:
        with optimizer.visit(block):
            steps(optimizer, 2)
        sgd = torch.optim.SGD([masters[name] for name in block.parameters], lr=0.01)
        for _ in range(2):
            plain(input_ids=TOKENS, labels=TOKENS).loss.backward()
            for name in block.parameters:
                gradient = by_name[name].grad
                assert gradient is not None
                masters[name].grad = gradient.float()
            plain.zero_grad()
            sgd.step()
            for name in block.parameters:
                by_name[name].data = upper_half(masters[name].data)
        assert_equal(weights_of(parts.model), weights_of(plain))
        for name, left in optimizer.block_low_bits(block.index).items():
            assert torch.equal(join(block.parameters[name].data, left), masters[name].data), name


# -- 8: memory --------------------------------------------------------------------------------------------------------


class Watched(torch.optim.AdamW):
    """AdamW with weak references to its state tensors."""

    seen: ClassVar[dict[int, weakref.ref[Tensor]]] = {}

    def step(self, closure=None):
        loss = super().step(closure)
        for entries in self.state.values():
            Watched.seen |= {id(value): weakref.ref(value) for value in entries.values()}
        return loss

    @classmethod
    def alive(cls) -> int:
        """How many of them still exist."""
        return sum(reference() is not None for reference in cls.seen.values())


def live_bytes() -> int:
    """Bytes of all tensors that exist in this process."""
    gc.collect()
    storages = [item.untyped_storage() for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_dropped_state_is_really_freed():
    """LISA froze layers but did not remove them from the optimizer: memory grew to that of full Adam as one block after
    another was visited. LMFlow kept 88 % of full Adam's state in this way."""
    parts = bt.partition(gpt2(), num_blocks=3)
    optimizer = bt.BlockOptimizer(parts, Watched, lr=0.01)
    before = live_bytes()
    for _ in range(2):
        for block in parts:
            with optimizer.visit(block):
                steps(optimizer, 2)
                assert Watched.alive() == 3 * len(block.parameters)  # two moments and a step count
                assert optimizer.state_bytes() == 8 * block.num_parameters + 4 * len(block.parameters)
            assert Watched.alive() == 0  # at once, without waiting for the garbage collector
        assert live_bytes() <= before  # less, if earlier tests had left something to collect


def test_resuming_inside_a_visit_leaves_only_its_block_trainable(tiny, interrupted: Path, tmp_path: Path):
    """When LISA was resumed inside an interval, every layer was trainable until the next switch."""
    context = build(tiny(), tmp_path)
    load_checkpoint(checkpoints(interrupted / "checkpoints")[-1], context.partition, context.optimizer)
    (active,) = context.optimizer.progress()["active"]
    assert active == 1
    assert trainable(context.model) == set()
    with context.optimizer.visit(context.partition[active]):
        assert trainable(context.model) == set(context.partition[active].parameters)
    assert trainable(context.model) == set()


# -- 9: settings that reach the optimizer -----------------------------------------------------------------------------

DECAYING = [
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and "weight_decay" in inspect.signature(value).parameters
]


@pytest.mark.parametrize("name", DECAYING)
def test_weight_decay_reaches_every_optimizer(tiny, tmp_path: Path, name: str):
    """The Hugging Face Trainer's GaLore and APOLLO dropped `weight_decay` silently. With zero gradients, weights that
    move are weights that decay."""

    def moved(weight_decay: float) -> set[str]:
        context = build(tiny(f"optimizer.name={name}", f"optimizer.weight_decay={weight_decay}"), tmp_path)
        for parameter in context.model.parameters():
            nn.init.constant_(parameter, 1.0)
        before = weights_of(context.model)
        for block in context.partition:
            with context.optimizer.visit(block):
                for group in context.optimizer.param_groups:
                    assert group["weight_decay"] in (weight_decay, 0.0)
                    for parameter in group["params"]:
                        parameter.grad = torch.zeros_like(parameter)
                context.optimizer.step()
        return {key for key, value in weights_of(context.model).items() if (value - before[key]).abs().max() > 1e-5}

    assert moved(0.0) == set()
    assert moved(0.25) == {key for key, p in build(tiny(), tmp_path).model.named_parameters() if p.ndim == 2}


def test_weight_decay_of_an_optimizer_without_it_is_refused(tiny, tmp_path: Path):
    """A class without weight decay is an error: the setting is not dropped silently."""
    with pytest.raises(ConfigError, match=r"Rprop has no 'weight_decay'"):
        build(tiny("optimizer.name=Rprop"), tmp_path)


@pytest.mark.usefixtures("uncounted")
def test_accumulation_does_not_advance_the_schedule(tiny, finished: Path, tmp_path: Path):
    """HiFT moved on to the next group of layers with every micro-batch; layer-wise GaLore forbade accumulation."""
    bt.run(tiny("batch.micro_rows=1"), tmp_path / "parts")
    whole, parts = events_of(finished, "step"), events_of(tmp_path / "parts", "step")
    for key in ("step", "visit", "block", "tokens", "lr"):
        assert [event[key] for event in parts] == [event[key] for event in whole]
    assert Counter(event["visit"] for event in parts) == {0: 4, 1: 4, 2: 4}
    context = build(tiny(), tmp_path)
    load_checkpoint(checkpoints(tmp_path / "parts" / "checkpoints")[-1], context.partition, context.optimizer)
    assert context.optimizer.steps == 12
    state = context.optimizer.block_state(0)
    assert state is not None
    assert {int(entries["step"]) for entries in state.values()} == {4}


# -- 10: a whole trainer ----------------------------------------------------------------------------------------------


def test_a_run_saves_schedules_and_evaluates(finished: Path):
    """MegaTrain's example trainer could not save, resume (tested above), schedule the learning rate or evaluate."""
    assert [path.name for path in checkpoints(finished / "checkpoints")] == ["step-00000010", "step-00000012"]
    assert [event["step"] for event in events_of(finished, "evaluation")] == [0, 3, 6, 9, 12]
    rates = [event["lr"] for event in events_of(finished, "step")]
    assert rates[0] < rates[1] > rates[-1] > 0


def test_each_epoch_has_an_order_of_its_own(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """MegaTrain's example trainer read its file from the top in every epoch."""
    (tmp_path / "small.txt").write_text("".join(f"{number} " for number in range(500)))
    requested: list[tuple[TokenRows, list[int]]] = []
    batch = TokenRows.batch

    def recorded(rows: TokenRows, indices: Any, **options: Any) -> dict[str, Tensor]:
        requested.append((rows, [int(index) for index in indices]))
        return batch(rows, indices, **options)

    def training_starts(record: Record) -> None:
        if isinstance(record, VisitStart):
            monkeypatch.setattr(TokenRows, "batch", recorded)

    settings = [f"text.source={tmp_path / 'small.txt'}", "blocks.count=1", "schedule.visit=2 epochs"]
    bt.run(tiny(*settings, "evaluation.every=9 epochs"), tmp_path / "run", listeners=[training_starts])
    train = requested[0][0]
    seen, count = [index for rows, indices in requested if rows is train for index in indices], len(train)
    first, second = seen[:count], seen[count : 2 * count]
    assert sorted(first) == sorted(second) == list(range(count))
    assert len({tuple(first), tuple(second), tuple(range(count))}) == 3


# -- the engine's own traps -------------------------------------------------------------------------------------------


def test_attention_on_a_cpu_is_counted():
    """PyTorch 2.13's FlopCounterMode counts no FLOPs for scaled_dot_product_attention on a CPU: at 4,096 tokens a
    7B model would look a tenth cheaper than it is."""
    batch, heads, tokens, width = 2, 3, 8, 4
    query = torch.randn(batch, heads, tokens, width, requires_grad=True)

    def attend() -> None:
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()

    product = 2 * batch * heads * tokens * tokens * width
    assert count_flops(attend) == (2 + 5) * product  # two products forward; backward one of them again, and four more


def test_a_tied_embedding_stays_frozen_while_the_head_is_active():
    """LISA always trained embedding and head (71 % of the parameters it trained at 8B), so each backward pass went
    through the whole model. Here a matrix that is used in both places belongs to the first block alone."""
    parts = bt.partition(gpt2(), num_blocks=3)
    head, embedding = parts.model.get_submodule("lm_head"), parts.model.get_submodule("transformer.wte")
    assert head.weight is embedding.weight
    assert [name for block in parts for name in block.parameters if "wte" in name or "lm_head" in name] == [
        "transformer.wte.weight"
    ]
    before = weights_of(parts.model)
    outputs: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda *seen: outputs.append(seen[-1])) for layer in parts[0].modules()]
    optimizer = bt.BlockOptimizer(parts, torch.optim.AdamW, lr=0.01)
    with optimizer.visit(parts[2]):
        assert trainable(parts.model) == set(parts[2].parameters)
        steps(optimizer, 1)
    for hook in hooks:
        hook.remove()
    assert outputs
    assert not any(output.requires_grad for output in outputs)
    moved = {name for name, value in weights_of(parts.model).items() if not torch.equal(value, before[name])}
    assert moved == set(parts[2].parameters)

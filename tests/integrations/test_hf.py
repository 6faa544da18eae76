"""BlockTrainer is the Trainer in blocks: what TrainingArguments say holds, and a resumed run ends as a whole one."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ..run_events import Crash
from ..tiny_configurations import tiny
from .conftest import CrashAt

pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import blocktrain as bt
from blocktrain.errors import CheckpointError, ConfigError, NonFiniteError
from blocktrain.integrations.hf import Blocks, BlockTrainer, RunLength
from blocktrain.optim.precision import join

VISIT = Blocks(count=3, visit=bt.Duration.steps(3))


class Watch(TrainerCallback):
    """Calls `look` after each optimizer step."""

    def __init__(self, look: Callable[[], None]):
        self.look = look

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.look()


@pytest.fixture
def make(model, rows, tmp_path: Path):
    """`make(blocks, name, callbacks=..., dropout=..., dtype=..., **TrainingArguments)`: a BlockTrainer."""

    def make_trainer(
        blocks: Blocks | None = VISIT,
        out: str = "out",
        *,
        callbacks: list[TrainerCallback] | None = None,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
        **arguments: Any,
    ) -> BlockTrainer:
        defaults: dict[str, Any] = {
            "per_device_train_batch_size": 4,
            "max_steps": 11,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "optim": "adamw_torch",
            "lr_scheduler_type": "constant",
        }
        args = TrainingArguments(output_dir=str(tmp_path / out), **{**defaults, **arguments})
        return BlockTrainer(
            model(dropout=dropout).to(dtype),
            args,
            train_dataset=rows(),
            eval_dataset=rows(8),
            callbacks=callbacks,
            blocks=blocks,
        )

    return make_trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert isinstance(trainer.model, nn.Module)
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def outcome(trainer: BlockTrainer) -> dict[str, Any]:
    """Weights, masters, moments, position, rate and losses: all that must not depend on an interruption."""
    assert trainer.visiting is not None
    clocks = ("runtime", "per_second", "train_loss")
    history = [
        {key: value for key, value in logged.items() if not any(word in key for word in clocks)}
        for logged in trainer.state.log_history
    ]
    return {"weights": weights(trainer), "optimizer": trainer.visiting.state_dict(), "history": history}


def assert_same(first: Any, second: Any, where: str = "") -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key, value in first.items():
            assert_same(value, second[key], f"{where}/{key}")
    elif isinstance(first, list):
        assert len(first) == len(second), where
        for index, value in enumerate(first):
            assert_same(value, second[index], f"{where}/{index}")
    else:
        assert first == second, where


def test_one_block_is_the_trainer(make, model, rows, tmp_path: Path) -> None:
    ours = make(Blocks(count=1), weight_decay=0.1, gradient_accumulation_steps=2)
    ours.train()
    theirs = Trainer(model(), ours.args, train_dataset=rows())
    theirs.train()
    assert_same(weights(ours), weights(theirs))


def test_weight_decay_acts_where_the_trainer_says(make, model, rows, caplog) -> None:
    """On what acts is said at the start; a trainer's own choice was ignored."""
    caplog.set_level("INFO", "blocktrain")
    trainer = make(Blocks(count=1), weight_decay=0.1)
    trainer.train()
    assert "weight_decay = 0.1 acts on 18 of 52 trained tensors" in caplog.text

    class DecayAll(BlockTrainer):
        def get_decay_parameter_names(self, model):
            return [name for name, _ in model.named_parameters()]

    ours = DecayAll(model(), trainer.args, train_dataset=rows(), blocks=Blocks(count=1))
    ours.train()
    net = model()
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    Trainer(net, trainer.args, train_dataset=rows(), optimizers=(adamw, None)).train()  # pyright: ignore[reportArgumentType]
    assert_same(weights(ours), {name: value.clone() for name, value in net.state_dict().items()})
    assert not torch.equal(weights(ours)["transformer.ln_f.weight"], weights(trainer)["transformer.ln_f.weight"])


def test_it_is_the_plain_loop(make, model) -> None:
    """The same rows in a loop of one's own."""
    trainer = make(max_steps=8, train_sampling_strategy="sequential", max_grad_norm=0.5)
    trainer.train()
    mine = model()
    partition = bt.partition(mine, num_blocks=3)
    optimizer = bt.BlockOptimizer(partition, torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0)
    step = 0
    for visit in bt.Cyclic(visit=bt.Duration.steps(3)).visits(partition):
        if step == 8:
            break
        with optimizer.visit(visit.block):
            for _ in range(min(3, 8 - step)):
                rows = trainer.train_dataset[4 * (step % 8) : 4 * (step % 8) + 4]
                batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
                labels = torch.tensor(batch["labels"].numel())  # the Trainer has the sum divided by what it counts
                mine(**batch, num_items_in_batch=labels).loss.backward()
                optimizer.clip_grad_norm(0.5)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
    assert_same(weights(trainer), {name: value.clone() for name, value in mine.state_dict().items()})


RESUMED: dict[str, dict[str, Any]] = {
    "accumulated, moments on the host": {
        "blocks": Blocks(count=3, visit=bt.Duration.steps(3), state=bt.KeepOnHost()),
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "dropout": 0.1,
    },
    "bf16-exact": {"dtype": torch.bfloat16, "lr_scheduler_type": "linear", "max_grad_norm": 0.1},
    "blocks smaller than a layer": {"blocks": Blocks(largest=2500, visit=bt.Duration.steps(3)), "max_grad_norm": 0.1},
    "autocast, activation checkpointing, shuffled blocks": {
        "blocks": Blocks(count=3, visit=bt.Duration.steps(3), order="shuffled"),
        "bf16": True,
        "activation_checkpointing": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
    },
}


@pytest.mark.parametrize(
    "settings",
    [pytest.param(value, marks=() if "bf16-exact" in name else pytest.mark.slow) for name, value in RESUMED.items()],
    ids=RESUMED,
)
def test_a_resumed_run_ends_as_a_whole_one(make, settings: dict[str, Any]) -> None:
    """Killed at step 6, resumed from the checkpoint of step 5, in mid-visit: block, step, moments, masters, rate."""
    settings = {"save_strategy": "steps", "save_steps": 5, **settings}
    whole = make(out="whole", **settings)
    whole.train()
    with pytest.raises(Crash):
        make(out="killed", callbacks=[CrashAt(6)], **settings).train()
    resumed = make(out="killed", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.visiting is not None
    assert (resumed.visiting.visit.index, resumed.visiting.visit_step) == (3, 2)
    assert_same(outcome(resumed), outcome(whole))


@pytest.mark.parametrize(
    "length",
    [{"max_steps": 9}, {"max_steps": 30}, {"max_steps": 200}, {"max_steps": -1, "num_train_epochs": 2}],
    ids=str,
)
def test_by_default_every_block_is_visited_equally_often(make, caplog, length: dict[str, Any]) -> None:
    """Visits lasted 100 steps in a run of any length: 9 steps trained block 0 only, 200 steps two of three blocks, and
    nothing said so."""
    steps: list[int] = []
    trainer = make(None, **length, callbacks=[Watch(lambda: steps.append(trainer.visiting.visit.block.index))])
    before = weights(trainer)
    trainer.train()
    after = weights(trainer)
    assert [name for name, _ in trainer.model.named_parameters() if torch.equal(after[name], before[name])] == []
    counts = [steps.count(index) for index in range(3)]
    assert sum(counts) == trainer.state.max_steps
    assert max(counts) - min(counts) <= 1
    assert steps == sorted(steps)  # one sweep
    assert "never visited" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_does_not_require_gradients_is_not_trained(make, dtype: torch.dtype) -> None:
    """A frozen embedding was thawed and trained."""
    trainer = make(None, max_steps=6, dtype=dtype)
    frozen = {"transformer.wpe.weight", "transformer.h.1.mlp.c_fc.weight"}
    for name in frozen:
        trainer.model.get_parameter(name).requires_grad_(False)
    before = weights(trainer)
    trainer.train()
    after = weights(trainer)
    assert {name for name, _ in trainer.model.named_parameters() if torch.equal(after[name], before[name])} == frozen


def flags(model: nn.Module) -> dict[str, bool]:
    return {
        **{name: parameter.requires_grad for name, parameter in model.named_parameters()},
        **{f"module {name}": module.training for name, module in model.named_modules()},
    }


@pytest.mark.parametrize("made", ["by train", "before", "by model_init"])
@pytest.mark.parametrize("crash", [False, True], ids=["", "crash"])
def test_flags_and_modes_are_as_they_were_found(make, made: str, crash: bool) -> None:
    """The model was left with one block that required gradients and was in train mode."""
    trainer = make(None, max_steps=5, callbacks=[CrashAt(3)] if crash else [])
    trainer.model.transformer.wpe.weight.requires_grad_(False)
    trainer.model.eval()
    trainer.model.transformer.h[1].train()
    before = flags(trainer.model)
    if made == "before":
        trainer.create_optimizer()
    if made == "by model_init":
        model = trainer.model
        trainer.model_init = lambda: model
    with pytest.raises(Crash) if crash else contextlib.nullcontext():
        trainer.train()
    assert flags(trainer.model) == before
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", [None, bt.BF16], ids=["", "masters are rebuilt"])
def test_a_paused_visit_continues_exactly(make, dtype: torch.dtype, precision: Any) -> None:
    """`train` leaves the visit at its end: neither moments nor low bits may be lost, whatever the visits keep."""
    blocks = Blocks(count=3, visit=bt.Duration.steps(4), precision=precision)
    if precision is not None and dtype == torch.float32:
        pytest.skip("one dtype is enough for masters that are rebuilt")
    once, paused = (make(blocks, dtype=dtype, max_steps=6) for _ in range(2))

    class Pause(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            before = paused.visiting.state_dict()
            paused.visiting.pause()
            assert_same(paused.visiting.state_dict(), before)
            paused.visiting.resume()

    paused.add_callback(Pause())
    once.train()
    paused.train()
    assert_same(outcome(paused), outcome(once))


def test_train_called_again_goes_on_with_the_visits(make) -> None:
    seen: list[int] = []
    trainer = make(max_steps=4, callbacks=[Watch(lambda: seen.append(trainer.visiting.visit.block.index))])
    trainer.train()
    trainer.train()
    assert seen == [0, 0, 0, 1, 1, 1, 2, 2]
    trainer.model.transformer.wpe.weight.requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r"'transformer.wpe.weight' has requires_grad = False.*make a new BlockTrainer"
    ):
        trainer.train()


def test_a_model_that_also_reads_images_trains_its_text_part_and_train_can_be_called_again(rows, tmp_path) -> None:
    """Its vision tower is in no block, although it requires gradients before and after."""
    model = AutoModelForCausalLM.from_config(tiny("gemma3"))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=3, report_to="none", use_cpu=True, disable_tqdm=True)
    trainer = BlockTrainer(model, args, train_dataset=rows(), blocks=Blocks(count=3))
    trainer.train()
    trainer.train()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert changed == {name for name in before if name.startswith(("model.language_model.", "lm_head."))}


def test_a_loss_that_is_not_finite_ends_the_run(make) -> None:
    """The trainer logs the loss of the steps before instead, and saved weights that were all NaN."""
    trainer = make(None, max_steps=6)
    name = "transformer.h.1.mlp.c_fc.weight"
    trainer.add_callback(Watch(lambda: trainer.model.get_parameter(name).data.fill_(torch.nan)))
    with pytest.raises(NonFiniteError, match=r"the loss is nan in step 2 .*a visit to Block\(0: .*lower learning_rate"):
        trainer.train()
    low = trainer.visiting.blocks.partition[0].parameters
    assert all(value.isfinite().all() for key, value in low.items() if key != name)


@pytest.mark.parametrize("precision", [bt.INT8, bt.NF4], ids=lambda precision: precision.name)
def test_frozen_weights_may_be_quantized(make, precision) -> None:
    trainer = make(Blocks(count=3, precision=precision), max_steps=9)
    before = weights(trainer)
    trainer.train()
    assert all(math.isfinite(logged["loss"]) for logged in trainer.state.log_history if "loss" in logged)
    after = weights(trainer)
    assert all(value.isfinite().all() for value in after.values())
    assert [name for name, _ in trainer.model.named_parameters() if torch.equal(after[name], before[name])] == []


def test_long_runs_have_whole_sweeps_and_their_number_can_be_given(make) -> None:
    partition = bt.partition(make().model, num_blocks=3)
    for blocks, steps, sweeps in ((Blocks(), 1000, 3), (Blocks(), 1001, 3), (Blocks(sweeps=4), 50, 4)):
        schedule = blocks.schedule(partition, RunLength(steps=steps, steps_per_epoch=None), seed=0)
        visits = list(itertools.islice(schedule.visits(partition), 3 * sweeps))
        assert sum(visit.duration.value for visit in visits) == steps
        assert max(visit.duration.value for visit in visits) - min(visit.duration.value for visit in visits) <= 1


def test_visits_may_be_given_in_epochs(make) -> None:
    """32 rows in batches of 4 are 8 steps an epoch."""
    seen: list[int] = []
    blocks = Blocks(visit=bt.Duration.epochs(0.5))
    trainer = make(blocks, max_steps=9, callbacks=[Watch(lambda: seen.append(trainer.visiting.visit.block.index))])
    trainer.train()
    assert seen == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_visits_in_epochs_need_rows_that_have_a_length(make) -> None:
    trainer = make(Blocks(visit=bt.Duration.epochs(1)))

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([trainer.eval_dataset[0]] * 100)

    trainer.train_dataset = Stream()
    with pytest.raises(ConfigError, match="visits of 1 epochs: the training rows have no length"):
        trainer.train()


@pytest.mark.parametrize(
    ("blocks", "missed", "way_out"),
    [
        (Blocks(visit=bt.Duration.steps(4)), 1, "or give Blocks(sweeps=1)"),
        (Blocks(visit=bt.Duration.steps(100)), 2, "Leave out Blocks(visit=100 steps)"),
        (Blocks(order=[0, 2]), 1, "Name them in Blocks(order=[0, 2]) too"),
        (Blocks(count=5, span="suffix", order="descending"), 1, "Train for more steps"),
    ],
)
def test_blocks_that_are_never_visited_are_named_at_the_start(make, caplog, blocks, missed: int, way_out: str) -> None:
    trainer = make(blocks, max_steps=4 if blocks.count == 5 else 8)
    trainer.create_optimizer()
    assert f"{missed} of {blocks.count} blocks are never visited" in caplog.text
    names = [repr(trainer.visiting.blocks.partition[index]) for index in ((1,) if blocks.order == [0, 2] else ())]
    assert all(name in caplog.text for name in names)
    assert way_out in caplog.text


def test_a_run_resumed_with_another_length_says_that_its_visits_differ(make, caplog) -> None:
    settings = {"save_strategy": "steps", "save_steps": 5}
    make(None, max_steps=9, **settings).train()
    make(None, max_steps=9, **settings).train(resume_from_checkpoint=True)
    assert "other visits" not in caplog.text
    make(None, max_steps=30, **settings).train(resume_from_checkpoint=True)
    assert "written under other visits (visits of 3 steps, order ascending, span block)" in caplog.text


def test_visits_are_counted_in_optimizer_steps(make) -> None:
    """HiFT counts micro-batches, so that accumulation shortens its visits."""
    seen = []
    trainer = make(
        gradient_accumulation_steps=3,
        max_steps=7,
        callbacks=[Watch(lambda: seen.append(trainer.visiting.visit.block.index))],
    )
    trainer.train()
    assert seen == [0, 0, 0, 1, 1, 1, 2]


def test_frozen_layers_run_in_eval_mode(make) -> None:
    """The Trainer calls `model.train()` before every micro-batch and after every evaluation."""
    modes: list[tuple[int, list[bool]]] = []
    trainer = make(dropout=0.1, eval_strategy="steps", eval_steps=2, gradient_accumulation_steps=2, max_steps=9)
    layers = trainer.model.transformer.h

    def look(*_: Any) -> None:
        if torch.is_grad_enabled():
            modes.append((trainer.visiting.visit.block.index, [layer.training for layer in layers]))

    trainer.model.register_forward_pre_hook(look)
    trainer.train()
    blocks = trainer.visiting.blocks.partition
    assert len(modes) == 18
    for index, training in modes:
        assert training == [any(module is layer for module in blocks[index].modules()) for layer in layers]


def test_masters_gradients_are_clipped(make) -> None:
    """What `model.parameters()` hold is empty under bf16-exact: the trainer would clip nothing and log a norm of 0."""
    norms: list[float] = []
    trainer = make(
        dtype=torch.bfloat16,
        max_grad_norm=0.01,
        max_steps=4,
        callbacks=[
            Watch(lambda: norms.append(float(torch.nn.utils.get_total_norm(trainer.visiting.blocks.gradients()))))
        ],
    )
    trainer.train()
    assert norms == pytest.approx([0.01] * 4, rel=1e-3)
    assert all(logged["grad_norm"] > 0.1 for logged in trainer.state.log_history if "grad_norm" in logged)


def test_gradients_do_not_outlive_their_step(make) -> None:
    """The trainer calls `model.zero_grad()` alone: masters would keep adding up."""
    left: list[int] = []

    class After(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            left.append(len(trainer.visiting.blocks.gradients()))

    trainer = make(dtype=torch.bfloat16, max_steps=4, callbacks=[After()])
    trainer.train()
    assert left == [0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_best_model_stays_loaded(make, dtype: torch.dtype) -> None:
    """Loaded in mid-visit, with masters of the last step: further training starts from the best weights, not theirs."""
    trainer = make(
        dtype=dtype,
        max_steps=5,
        learning_rate=0.5,  # so that it gets worse
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name != "checkpoint-5"
    saved = type(trainer.model).from_pretrained(best, dtype=dtype).state_dict()
    assert_same(weights(trainer), dict(saved))
    visiting = trainer.visiting
    visiting.resume()
    visiting.blocks.scale_learning_rate(0.0)
    visiting.param_groups[0]["lr"] = 0.0
    trainer.model(**{key: value[None] for key, value in trainer.train_dataset[0].items()}).loss.backward()
    visiting.step()  # at rate 0, a step only writes the masters back
    assert_same(weights(trainer), dict(saved))


def test_an_exact_run_keeps_what_bf16_leaves_out(make) -> None:
    """At a rate too small for bf16 nothing moves in the weights, everything in the masters."""
    trainer = make(dtype=torch.bfloat16, learning_rate=1e-6, max_steps=9)
    before = weights(trainer)
    trainer.train()
    blocks = trainer.visiting.blocks
    moved = 0
    for block in blocks.partition:
        for name, remainder in blocks.block_low_bits(block.index).items():
            moved += int((join(block.parameters[name].data, remainder) != before[name].float()).sum())
    scalars = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert moved > 0.9 * scalars


def test_layers_can_be_named(make) -> None:
    layers = {"low": ["transformer.wte", "transformer.wpe"], "rest": ["transformer.h", "transformer.ln_f", "lm_head"]}
    trainer = make(Blocks(count=2, layers=layers))
    trainer.create_optimizer()
    assert [block.names for block in trainer.visiting.blocks.partition] == [("low",), ("rest",)]


def test_what_cannot_work_is_refused(make, model) -> None:
    with pytest.raises(ConfigError, match="balance = 'flops' counts a forward pass over a batch, and Blocks has none"):
        Blocks(balance="flops")
    with pytest.raises(ConfigError, match="visits of 2000 tokens"):
        make(Blocks(visit=bt.Duration.tokens(2000))).train()
    with pytest.raises(ConfigError, match=r"visit = 2 epochs and sweeps = 1: .* give one of them"):
        Blocks(visit=bt.Duration.epochs(2), sweeps=1)
    with pytest.raises(ConfigError, match="sweeps = 4 are 12 visits, and the run has 11 steps"):
        make(Blocks(sweeps=4)).train()
    trainer = make()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="BlockTrainer makes its own"):
        trainer.train()
    trainer = make()
    trainer.args.fp16 = True
    with pytest.raises(ConfigError, match="fp16"):
        trainer.create_optimizer()
    trainer = make()
    trainer.args._n_gpu = 2
    with pytest.raises(ConfigError, match=r"2 GPUs in one process .*CUDA_VISIBLE_DEVICES"):
        trainer.create_optimizer()
    trainer = make()
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ConfigError, match="DeepSpeed divides weights among processes and does not"):
        trainer.create_optimizer()
    trainer = make()
    trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"params": [], "lr": 0.1})
    with pytest.raises(ConfigError, match="chooses its own parameters"):
        trainer.create_optimizer()
    packed = Blocks(precision=bt.INT8)
    with pytest.raises(ConfigError, match="load_best_model_at_end = True copies weights into a model whose frozen"):
        make(packed, load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps").create_optimizer()
    trainer = make(packed)
    trainer.create_optimizer()
    with pytest.raises(ConfigError, match="resume with a new trainer and a new model"):
        trainer._load_from_checkpoint("somewhere")
    with pytest.raises(ConfigError, match=r"blocks = 3: give Blocks\(count=3\)"):
        make(3)
    trainer = make()
    trainer.create_optimizer()
    with pytest.raises(CheckpointError, match="not saved by blocktrain"):
        trainer.visiting.load_state_dict(torch.optim.SGD(model().parameters(), lr=0.1).state_dict())


def test_the_class_of_the_optimizer_is_the_users(make) -> None:
    """Any class with its arguments, Muon's matrices and all."""
    trainer = make(max_steps=4)
    trainer.optimizer_cls_and_kwargs = (torch.optim.Muon, {"lr": 1e-3})
    trainer.train()
    trainer.visiting.resume()
    assert {type(optimizer) for optimizer in trainer.visiting.blocks.active_block.optimizers} == {
        torch.optim.Muon,
        torch.optim.AdamW,
    }

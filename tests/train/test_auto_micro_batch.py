"""`batch.micro_rows = "auto"`: what fits is predicted, rehearsed, decided once and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import blocktrain as bt
from blocktrain.errors import OutOfMemoryError
from blocktrain.records.log import Event, read_events
from blocktrain.train import auto_micro_batch
from blocktrain.train.auto_micro_batch import auto_micro_rows, beside_weights, divisors, step_shape
from blocktrain.train.context import TrainingContext, build
from blocktrain.train.predict_memory import predicted_peaks

SMALL = ["model.config.n_layer=1", "blocks.count=1", "optimizer.state=drop"]  # each prediction visits every block


@pytest.fixture
def context(tiny, tmp_path: Path) -> TrainingContext:
    return build(tiny("batch.micro_rows=auto", *SMALL), tmp_path)


def needed(context: TrainingContext, rows: int) -> int:
    return max(beside_weights(peak) for peak in predicted_peaks(context.optimizer, step_shape(context, rows)))


def leave(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(auto_micro_batch, "free_memory_bytes", lambda _: int(free))


def decided(run: Path) -> Event:
    (event,) = [event for event in read_events(run / "events.jsonl") if event["kind"] == "micro_batch"]
    return event


def test_divisors_come_largest_first() -> None:
    assert divisors(12) == [12, 6, 4, 3, 2, 1]


def test_the_largest_that_fits_is_taken(context: TrainingContext, monkeypatch: pytest.MonkeyPatch) -> None:
    four, two = needed(context, 4), needed(context, 2)
    assert four > two
    leave(monkeypatch, four / auto_micro_batch.SHARE + 1)
    assert auto_micro_rows(context).micro_rows == 4
    leave(monkeypatch, four / auto_micro_batch.SHARE - 1)
    assert auto_micro_rows(context).micro_rows == 2


def test_one_that_fails_in_the_rehearsal_is_divided(context: TrainingContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation that the prediction did not foresee."""
    real = auto_micro_batch.step_shape

    def failing(context: TrainingContext, rows: int):
        def loss(model):
            if rows > 2 and not isinstance(next(model.parameters()), torch._subclasses.FakeTensor):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
            return shape.loss(model)

        shape = real(context, rows)
        return auto_micro_batch.StepShape(loss=loss, micro_steps=shape.micro_steps, inputs=shape.inputs)

    monkeypatch.setattr(auto_micro_batch, "step_shape", failing)
    found = auto_micro_rows(context)
    assert (found.micro_rows, found.failed) == (2, (4,))


def test_nothing_fits(context: TrainingContext, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 1000)
    with pytest.raises(
        OutOfMemoryError, match=r"not a single row fits: .* needed in addition to the weights, 1000 B free; the l"
    ):
        auto_micro_rows(context)


def test_the_rehearsal_leaves_no_trace(context: TrainingContext) -> None:
    before = {name: value.clone() for name, value in context.model.state_dict().items()}
    random, modes = torch.get_rng_state(), [module.training for module in context.model.modules()]
    assert auto_micro_rows(context).micro_rows == 4
    assert all(torch.equal(value, before[name]) for name, value in context.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in context.model.modules()] == modes
    assert not any(p.requires_grad or p.grad is not None for p in context.model.parameters())


def test_a_run_trains_as_decided_and_a_resumed_one_does_not_decide_again(
    tiny, outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("batch.micro_rows=auto", "stop.duration=3 steps", *SMALL)
    free = needed(build(config, tmp_path), 2) / auto_micro_batch.SHARE + 1
    leave(monkeypatch, free)
    bt.run(config, tmp_path / "auto")
    assert decided(tmp_path / "auto")["micro_rows"] == 2

    bt.run(tiny("batch.micro_rows=2", "stop.duration=3 steps", *SMALL), tmp_path / "two")
    log, weights = outcome(tmp_path / "auto")
    expected, expected_weights = outcome(tmp_path / "two")
    log = [{**event, "micro_rows": 2} if event["kind"] == "run" else event for event in log]
    assert [event for event in log if event["kind"] != "micro_batch"] == expected
    assert weights == expected_weights

    leave(monkeypatch, 1000)  # it would not fit any more; the run says what it was
    bt.resume(tmp_path / "auto")
    assert decided(tmp_path / "auto")["micro_rows"] == 2

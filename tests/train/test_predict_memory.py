"""Predicted peaks are those of the real thing, by part, and the prediction leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import blocktrain as bt
from blocktrain.optim.block_optimizer import BlockOptimizer
from blocktrain.optim.precision import BF16_EXACT, FP32, Precision
from blocktrain.train.predict_memory import StepShape, predicted_peaks, visited_peaks

TOKENS = torch.zeros(2, 16, dtype=torch.long)
STEP = StepShape(loss=lambda model: model(input_ids=TOKENS, labels=TOKENS).loss, inputs=[TOKENS])


def optimizer(precision: Precision = FP32, *, layers: int = 2, **cut: Any) -> BlockOptimizer:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4
        )
    )
    partition = bt.partition(model, **(cut or {"num_blocks": 3}))
    return BlockOptimizer(partition, torch.optim.AdamW, lr=1e-3, precision=precision)


@pytest.mark.parametrize("precision", [FP32, BF16_EXACT], ids=lambda precision: precision.name)
def test_the_prediction_is_what_real_steps_take(precision: Precision) -> None:
    mine = optimizer(precision)
    predicted = predicted_peaks(mine, STEP)
    assert predicted == list(visited_peaks(mine, STEP))


def test_the_prediction_leaves_no_trace() -> None:
    mine = optimizer(BF16_EXACT)
    model = mine.partition.model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [parameter.requires_grad for parameter in model.parameters()]
    random = torch.get_rng_state()
    predicted_peaks(mine, STEP)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert torch.equal(torch.get_rng_state(), random)
    assert mine.block is None
    assert mine.steps == 0
    assert all(module.training for module in model.modules())


def test_fixed_parts_are_known_sizes() -> None:
    """AdamW keeps two fp32 moments and a step count of 4 bytes for each tensor; a master is fp32, weights are bf16."""
    mine = optimizer(BF16_EXACT)
    weights = sum(parameter.numel() for parameter in mine.partition.model.parameters())
    for block, peak in zip(mine.partition, predicted_peaks(mine, STEP), strict=True):
        assert peak.parts["frozen"] + peak.parts["active"] == 2 * weights
        assert peak.parts["master"] == 4 * block.num_parameters
        assert peak.parts["moments"] == 8 * block.num_parameters + 4 * len(block.parameters)
        assert peak.host_bytes == 2 * weights  # the low_bits


def test_blocks_between_alike_ones_lie_on_the_line_or_below() -> None:
    """The shortcut against the full sweep: exact where the same moment is the worst at both ends, never too low."""
    mine = optimizer(BF16_EXACT, layers=5, num_blocks=7)
    short = predicted_peaks(mine, STEP)
    long = list(visited_peaks(mine, STEP))
    assert len(short) == len(long) == 7
    assert [short[index] for index in (0, 1, 5, 6)] == [long[index] for index in (0, 1, 5, 6)]
    for between, true in zip(short[2:5], long[2:5], strict=True):
        assert true.bytes <= between.bytes <= 1.02 * true.bytes


def test_blocks_smaller_than_a_layer() -> None:
    mine = optimizer(BF16_EXACT, largest=2000)
    assert any(block.rows for block in mine.partition)
    assert predicted_peaks(mine, STEP) == list(visited_peaks(mine, STEP))


def test_visits_to_several_blocks() -> None:
    mine = optimizer(BF16_EXACT)
    trained = [mine.partition.suffix(index) for index in range(len(mine.partition))]
    predicted = predicted_peaks(mine, STEP, blocks=trained)
    assert predicted == list(visited_peaks(mine, STEP, blocks=trained))
    assert [peak.parts["master"] for peak in predicted] == [4 * block.num_parameters for block in trained]


def test_full_training_needs_more_than_any_block() -> None:
    mine = optimizer()
    (full,) = predicted_peaks(mine, STEP, partition=mine.partition.undivided)
    assert full.bytes > max(peak.bytes for peak in predicted_peaks(mine, STEP))
    assert full.parts["active"] == sum(p.nbytes for p in mine.partition.model.parameters())
    assert "frozen" not in full.parts


def test_a_second_micro_batch_finds_the_gradients_of_the_first() -> None:
    mine = optimizer(BF16_EXACT)
    (once, twice) = (
        predicted_peaks(mine, StepShape(loss=STEP.loss, micro_steps=count, inputs=STEP.inputs))[0] for count in (1, 2)
    )
    assert twice.bytes >= once.bytes
    assert twice.parts["gradients"] >= 2 * mine.partition[0].num_parameters


def test_an_optimizer_that_reads_numbers_can_be_predicted() -> None:
    """Adafactor reads a norm out of a tensor, which has no number here."""
    mine = optimizer()
    other = BlockOptimizer(mine.partition, torch.optim.Adafactor, lr=1e-3)
    assert predicted_peaks(other, STEP)[0].parts["moments"] < predicted_peaks(mine, STEP)[0].parts["moments"]

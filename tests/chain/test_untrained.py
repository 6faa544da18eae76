"""Parameters that do not require gradients are in no block: nothing trains them, and nothing thaws them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import blocktrain as bt
from blocktrain.chain.freezing import release
from blocktrain.errors import PartitionError

from ..tiny_models import gpt2

TOKENS = torch.arange(32).reshape(2, 16) % 64
LOW = "transformer.wte.weight", "transformer.wpe.weight"


class Adapted(nn.Module):
    """A projection as PEFT's LoRA makes it: the frozen base and two small trained matrices beside it."""

    def __init__(self, base: nn.Module, width: int, rank: int = 2):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        outputs = base(torch.zeros(1, width)).shape[-1]
        self.lora_A, self.lora_B = nn.Linear(width, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))


def adapted() -> nn.Module:
    """A GPT-2 whose parameters are all frozen but those of an adapter in each layer."""
    model = gpt2().requires_grad_(False)
    torch.manual_seed(1)
    for layer in model.transformer.h:
        layer.attn.c_attn = Adapted(layer.attn.c_attn, model.config.n_embd)
    return model


def train(optimizer: bt.BlockOptimizer, steps: int = 2) -> None:
    for block in optimizer.partition:
        with optimizer.visit(block):
            assert {n for n, p in optimizer.partition.model.named_parameters() if p.requires_grad} == {
                *block.parameters
            }
            for _ in range(steps):
                optimizer.partition.model(input_ids=TOKENS, labels=TOKENS).loss.backward()
                optimizer.step()
                optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.float().clone() for name, value in model.state_dict().items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_a_frozen_embedding_is_not_trained():
    """It was: the optimizer thawed every parameter of the block that it visited."""
    model = gpt2()
    for name in LOW:
        model.get_parameter(name).requires_grad_(False)
    before = values(model)
    parts = bt.partition(model, num_blocks=2)
    assert not set(LOW) & {name for block in parts for name in block.parameters}
    assert sum(block.num_parameters for block in parts) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert parts[0].boundary == 1  # the embedding is in no block
    train(bt.BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2))
    assert changed(before, values(model)) == set(parts.whole.parameters)


@pytest.mark.parametrize("precision", [bt.FP32, bt.BF16_EXACT, bt.INT8, bt.NF4], ids=lambda precision: precision.name)
@pytest.mark.parametrize(
    "options", [{"num_blocks": 2}, {"num_blocks": 3, "pieces": "modules"}, {"largest": 200}], ids=str
)
def test_adapters_are_trained_in_blocks_and_their_base_stays(precision, options):
    model = adapted()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    parts = bt.partition(model, **options)
    assert set(parts.whole.parameters) == trained
    optimizer = bt.BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2, precision=precision)
    before = values(model)
    train(optimizer)
    assert changed(before, values(model)) == trained
    optimizer.close()
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained


@pytest.mark.parametrize("steps", ["frozen", "active", "copied"])
def test_what_a_block_optimizer_froze_is_no_choice_of_the_users(steps: str):
    """A model may be cut again while an optimizer has it frozen, and so may its copy."""
    model = gpt2()
    model.get_parameter(LOW[1]).requires_grad_(False)
    parts = bt.partition(model, num_blocks=2)
    optimizer = bt.BlockOptimizer(parts, torch.optim.AdamW, lr=1e-2)
    if steps == "active":
        with optimizer.visit(parts[1]):
            again = bt.partition(model, num_blocks=3)
    else:
        again = bt.partition(copy.deepcopy(model) if steps == "copied" else model, num_blocks=3)
    assert set(again.whole.parameters) == set(parts.whole.parameters)


def test_a_copy_with_the_same_blocks_has_the_same_untrained_parameters():
    model = adapted()
    parts = bt.partition(model, num_blocks=2)
    release(parts)
    replica = parts.rebind(copy.deepcopy(model))
    assert replica.chain.owned[1].keys() == parts.chain.owned[1].keys() != set()
    assert replica.chain.untrained == parts.chain.untrained


def test_a_tied_weight_that_is_frozen_is_untrained_under_both_names():
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    model.lm_head.weight.requires_grad_(False)
    parts = bt.partition(model, num_blocks=2)
    assert not {"transformer.wte.weight", "lm_head.weight"} & parts.whole.parameters.keys()
    assert set(parts.chain.untrained_parameters) == {"transformer.wte.weight"}


def test_a_block_without_anything_to_train_is_an_error():
    model = gpt2().requires_grad_(False)
    with pytest.raises(PartitionError, match="no parameter of GPT2LMHeadModel requires gradients"):
        bt.partition(model, num_blocks=2)
    model.transformer.h[1].requires_grad_(True)
    assert len(bt.partition(model, num_blocks=1)) == 1
    with pytest.raises(PartitionError, match="owns no parameters that require gradients: use fewer blocks"):
        bt.partition(model, num_blocks=2)


def test_a_frozen_weight_in_16_bits_needs_no_master():
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora" not in name and name.startswith("transformer.wte"):
            parameter.data = parameter.data.to(torch.bfloat16)
    bt.BlockOptimizer(bt.partition(model, num_blocks=2), torch.optim.AdamW, lr=1e-2, precision=bt.FP32)

"""What is active and what is frozen: gradients, modes, saved activations, checkpointing."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from blocktrain.chain.block import Block, Partition
from blocktrain.chain.freezing import activate, release, set_train_modes
from blocktrain.chain.partition import partition
from blocktrain.modules.recompute import Recomputed
from blocktrain.modules.wrap import wrappers_of

from ..tiny_configurations import tiny
from ..tiny_models import checkpoint_activations, gpt2, llama

TOKENS = torch.arange(32).reshape(2, 16) % 64


def loss_of(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    loss_of(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_only_the_active_block_wants_gradients():
    parts = partition(gpt2(), num_blocks=3)
    for block in parts:
        activate(parts, block)
        wanting = {name for name, p in parts.model.named_parameters() if p.requires_grad}
        assert wanting == set(block.parameters)


def test_the_backward_gives_what_full_training_would_give_the_block():
    parts = partition(gpt2(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), num_blocks=3)
    full = gradients(parts.model)
    for block in parts:
        release(parts)
        activate(parts, block)
        mine = gradients(parts.model)
        assert set(mine) == set(block.parameters)
        # The tied embedding's gradient is one sum over both uses in either case.
        assert all(torch.equal(mine[name], full[name]) for name in mine)


def test_release_freezes_everything_and_leaves_no_gradient():
    parts = partition(gpt2(), num_blocks=3)
    activate(parts, parts[1])
    loss_of(parts.model).backward()
    release(parts)
    assert all(p.grad is None and not p.requires_grad for p in parts.model.parameters())


# -- modes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_dropout() -> Partition:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8), nn.Dropout())
    return partition(model, num_blocks=3)


def prefix_output(parts: Partition) -> Tensor:
    first = parts.model.get_submodule("0"), parts.model.get_submodule("1")
    return first[1](first[0](torch.ones(4, 8)))


def test_dropout_does_nothing_in_frozen_layers(with_dropout: Partition):
    activate(with_dropout, with_dropout[2])
    assert torch.equal(prefix_output(with_dropout), prefix_output(with_dropout))
    assert [module.training for module in with_dropout.model.children()] == [False] * 4 + [True] * 2


def test_dropout_acts_in_active_layers(with_dropout: Partition):
    activate(with_dropout, with_dropout[0])
    assert not torch.equal(prefix_output(with_dropout), prefix_output(with_dropout))


def test_dropout_acts_in_frozen_layers_where_asked_for(with_dropout: Partition):
    activate(with_dropout, with_dropout[2], frozen_dropout=True)
    assert not torch.equal(prefix_output(with_dropout), prefix_output(with_dropout))


def test_modes_are_put_back_after_an_evaluation(with_dropout: Partition):
    activate(with_dropout, with_dropout[1])
    modes = [module.training for module in with_dropout.model.modules()]
    with_dropout.model.eval()
    set_train_modes(with_dropout, with_dropout[1])
    assert [module.training for module in with_dropout.model.modules()] == modes
    with_dropout.model.train()
    set_train_modes(with_dropout, with_dropout[1])
    assert [module.training for module in with_dropout.model.modules()] == modes


@pytest.mark.parametrize("frozen_dropout", [False, True])
def test_batchnorm_of_a_frozen_block_does_not_move(frozen_dropout: bool):
    """Nor does what it puts out depend on the other rows of the batch."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    parts = partition(model, patterns=[["0", "1"], ["2", "3"], ["4"]])
    activate(parts, parts[1], frozen_dropout=frozen_dropout)
    before = {name: value.clone() for name, value in model.named_buffers()}
    batch = torch.randn(8, 4)
    model(batch).sum().backward()
    moved = {name for name, value in model.named_buffers() if not torch.equal(value, before[name])}
    assert moved == {"3.running_mean", "3.running_var", "3.num_batches_tracked"}
    others = torch.cat([batch[:2], torch.randn(6, 4)])  # as many rows: for fewer, matrix products may round otherwise
    assert torch.equal(model[:2](batch)[:2], model[:2](others)[:2])


# -- saved activations ------------------------------------------------------------------------------------------------


def saved_by_layer(parts: Partition, block: Block) -> Counter[str]:
    """How many tensors autograd saves while each layer runs, with `block` active."""
    activate(parts, block)
    saved: Counter[str] = Counter()
    running: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        saved[running[-1] if running else "between"] += 1
        return tensor

    hooks = []
    for layer in parts.chain.layers:
        for module in layer.modules.values():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=layer.name: running.append(name)))
            hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(parts.model)
    for hook in hooks:
        hook.remove()
    return saved


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model", [gpt2, llama])
def test_a_frozen_prefix_saves_no_activations(model, checkpointing: bool):
    """Hugging Face makes the embedding's output require a gradient when it switches checkpointing on: the whole prefix
    was then differentiated, and saved more than without checkpointing."""
    parts = partition(model(), num_blocks=3)
    if checkpointing:
        checkpoint_activations(parts.model, reentrant=False)
    for block in parts[1:]:
        saved = saved_by_layer(parts, block)
        first = block.boundary
        assert first > 0
        assert [saved[layer.name] for layer in parts.chain.layers[:first]] == [0] * first
        assert saved[block.layers[0].name] > 0
        assert saved["between"] > 0  # the loss: the hooks do see what is saved


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model", [gpt2, llama])
def test_hugging_faces_checkpointing_changes_no_gradient_whichever_block_is_active(model, reentrant: bool):
    """BAdam, reentrant: "element 0 of tensors does not require grad"; with the head active, no gradients, no error."""
    parts = partition(model(), num_blocks=3)
    for p in parts.model.modules():
        if isinstance(p, nn.Dropout):
            p.p = 0.0
    expected = []
    for block in parts:
        activate(parts, block)
        expected.append(gradients(parts.model))
        release(parts)
    checkpoint_activations(parts.model, reentrant=reentrant)
    for block, without in zip(parts, expected, strict=True):
        activate(parts, block)
        found = gradients(parts.model)
        release(parts)
        assert found.keys() == without.keys() == block.parameters.keys()
        assert all(torch.equal(found[name], without[name]) for name in without)


def test_hugging_faces_checkpointing_is_taken_over_and_handed_back():
    parts = partition(gpt2(), num_blocks=3)
    checkpoint_activations(parts.model, reentrant=True)

    def switched_on() -> set[str]:
        return {name for name, m in parts.model.named_modules() if getattr(m, "gradient_checkpointing", False)}

    def recomputed() -> list[str]:
        modules = parts.model.named_modules()
        return [name for name, m in modules if any(isinstance(around, Recomputed) for around in wrappers_of(m))]

    theirs, ours = switched_on(), [layer.name for layer in parts.chain.layers[1:-1]]
    assert set(ours) < theirs
    for block in (parts[0], parts[2], parts[2]):  # also activated again without having been released
        activate(parts, block)
        assert switched_on() == set()
        assert recomputed() == ours
    release(parts)
    assert switched_on() == theirs
    assert not any("forward" in vars(m) for m in parts.model.modules())


def test_with_all_blocks_active_the_dropout_of_a_container_acts_as_in_ordinary_training():
    """XGLM drops out embeddings in the code that contains its layers, which stayed in eval mode."""
    model = hf.AutoModelForCausalLM.from_config(tiny("xglm"))
    whole, thirds = partition(model, num_blocks=1), partition(model, num_blocks=3)
    activate(whole, whole[0])
    assert model.model.training
    assert model.training
    activate(thirds, thirds[0])
    assert not model.model.training
    assert not model.training

"""Peaks by part: counted by hand, found by PyTorch's MemTracker too, and the same on fake tensors as on real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM

from blocktrain.memory.fake import fake_copy
from blocktrain.memory.tracker import MemoryTracker

FLOAT = 4


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    )


def batch() -> dict[str, Tensor]:
    tokens = torch.zeros(2, 16, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def test_a_storage_counts_once_whole_and_while_it_lives() -> None:
    with MemoryTracker() as tracker:
        a = torch.ones(100)
        rows = a[:50].view(5, 10)
        assert tracker.bytes == 100 * FLOAT
        b = a + 1
        del a
        assert tracker.bytes == 200 * FLOAT  # `rows` still holds it
        del rows, b
        assert tracker.bytes == 0
    assert tracker.peak().bytes == 200 * FLOAT
    assert tracker.peak().operation == "aten.add.Tensor"


def test_parts_are_those_of_the_worst_moment_with_labels_that_came_later() -> None:
    weight = torch.ones(10)
    with MemoryTracker() as tracker:
        tracker.label("frozen", [weight])
        small = torch.ones(5)
        large = torch.ones(100)  # the worst moment
        tracker.label("gradients", [large])
        del large
        after = torch.ones(50)
    assert tracker.peak().parts == {"gradients": 100 * FLOAT, "frozen": 10 * FLOAT, "activations": 5 * FLOAT}
    del small, after


def test_the_host_does_not_count_and_the_peak_can_be_reset() -> None:
    kept = torch.ones(1000)
    with MemoryTracker() as tracker:
        tracker.label("host", [kept])
        first = torch.ones(20)
        assert (tracker.peak().bytes, tracker.peak().host_bytes) == (20 * FLOAT, 1000 * FLOAT)
        del first
        tracker.reset_peak()
        assert tracker.peak().bytes == 0
        second = torch.ones(7)
        tracker.label("host", [second])
        assert tracker.bytes == 0


def test_what_lies_on_the_host_stays_there_whatever_it_is_called_next() -> None:
    with MemoryTracker() as tracker:
        kept = torch.empty(1000)
        tracker.label("host", [kept])
        tracker.label("frozen", [kept])
        tracker.reset_peak()
        made = torch.empty(10)
        assert (tracker.peak().bytes, tracker.peak().host_bytes) == (made.nbytes, kept.nbytes)


def test_what_goes_to_the_host_was_on_the_device_until_then() -> None:
    """On a CPU a copy to the host is the tensor itself: a weight that rests again left the peak before, too."""
    with MemoryTracker() as tracker:
        weight = torch.ones(20)
        tracker.label("active", [weight])
        moment = torch.ones(5)
        tracker.label("host", [weight])
        del moment
        after = torch.ones(3)
    assert (tracker.bytes, tracker.peak().bytes) == (3 * FLOAT, 25 * FLOAT)
    assert (tracker.peak().parts["active"], tracker.peak().host_bytes) == (20 * FLOAT, 0)
    del weight, after


def test_a_resized_storage_counts_as_it_is() -> None:
    with MemoryTracker() as tracker:
        a = torch.ones(10)
        a.resize_(30)
        assert tracker.bytes == 30 * FLOAT


def test_logits_are_what_is_as_wide_as_the_vocabulary() -> None:
    hidden, head = torch.ones(4, 8), torch.ones(8, 96)
    with MemoryTracker(logits_width=96) as tracker:
        probabilities = (hidden @ head).softmax(-1)
    assert tracker.peak().parts == {"logits": 2 * 4 * 96 * FLOAT}
    del probabilities


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(**batch()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("copied", [lambda model: model, lambda model: fake_copy(model).model], ids=["real", "fake"])
def test_pytorchs_mem_tracker_finds_the_same_peak(copied: Callable[[nn.Module], nn.Module]) -> None:
    """Ours on the first of two equal models, MemTracker on the second; on fake tensors and on real ones."""
    peaks = []
    for mine in (True, False):
        model = copied(llama())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if mine:
            with MemoryTracker() as tracker:
                tracker.label("weights", [*model.parameters(), *model.buffers()])
                step(model, optimizer)
            peaks.append(tracker.peak().bytes)
        else:
            theirs = MemTracker()
            theirs.track_external(model)
            with theirs:
                step(model, optimizer)
            peaks.append(theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    assert peaks[0] == peaks[1]


def test_the_same_peak_and_parts_on_fake_tensors() -> None:
    found = []
    for model in (llama(), fake_copy(llama()).model):
        with MemoryTracker(logits_width=96) as tracker:
            tracker.label("weights", [*model.parameters(), *model.buffers()])
            step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        found.append(tracker.peak())
    assert found[0] == found[1]
    assert found[0].bytes > 0


@pytest.mark.filterwarnings("ignore:global module forward hook")  # it stumbles over its own error
def test_why_not_mem_tracker() -> None:
    """Limits that the module's docstring names; should a later PyTorch lift them, this fails and says so."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    with pytest.raises(RuntimeError, match="doesn't require gradient"), MemTracker():
        layers(torch.ones(1, 4))

    layers.requires_grad_(True)
    with MemTracker():
        layers(torch.ones(1, 4))
        with pytest.raises(NotImplementedError, match="multiple iterative calls"):
            layers(torch.ones(1, 4))


def test_mem_tracker_does_not_know_a_masters_gradient() -> None:
    """It is no module's parameter: what a hook makes of the weight's gradient is not a gradient to MemTracker."""
    layer = nn.Linear(8, 8, bias=False)
    kept: list[Tensor] = []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: kept.append(weight.grad.double()))
    with MemTracker() as theirs:
        layer(torch.ones(2, 8)).sum().backward()
        layer.weight.grad = None
        snapshot = theirs.get_tracker_snapshot("current")[torch.device("cpu")]
    sizes = {getattr(kind, "value", kind): size for kind, size in snapshot.items()}
    assert sizes["Gradient"] == 0
    assert sizes["Temp"] >= kept[0].nbytes

"""Wrappers around a module's forward pass."""

import copy
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from blocktrain.memory.fake import fake_copy
from blocktrain.modules.wrap import wrap_forward


@dataclass(eq=False)
class Recorder:
    """Records its name each time it runs."""

    name: str
    seen: list[str] = field(default_factory=list)

    def __call__(self, run, *args, **kwargs):
        self.seen.append(self.name)
        return run(*args, **kwargs)


def test_the_last_wrapper_is_the_outermost_and_removing_all_restores_the_module() -> None:
    module, seen, x = nn.Linear(3, 3), [], torch.ones(1, 3)
    expected = module(x)
    remove_inner = wrap_forward(module, Recorder("inner", seen))
    remove_outer = wrap_forward(module, Recorder("outer", seen))
    assert torch.equal(module(x), expected)
    assert seen == ["outer", "inner"]
    remove_inner()
    module(x)
    assert seen == ["outer", "inner", "outer"]
    remove_outer()
    assert "forward" not in module.__dict__


def test_a_forward_that_another_library_has_set_is_wrapped_and_comes_back() -> None:
    """TRL's GRPO computes the output projection in fp32 by one. It was thrown away, without a word, and for good."""
    module, recorder, x = nn.Linear(3, 3), Recorder("a"), torch.ones(1, 3)
    theirs = module.forward = lambda input: 2 * nn.functional.linear(input, module.weight, module.bias)
    expected = module(x)
    remove = wrap_forward(module, recorder)
    assert torch.equal(module(x), expected)
    assert recorder.seen == ["a"]
    twin = copy.deepcopy(module)
    assert torch.equal(2 * twin(x), expected)  # the class's forward: theirs would read the original's weights
    remove()
    assert module.forward is theirs


def test_a_wrapper_inside_a_checkpoint_runs_again_when_activations_are_recomputed() -> None:
    module, inner = nn.Linear(3, 3), Recorder("fetch")
    wrap_forward(module, inner)
    wrap_forward(module, lambda run, x: checkpoint(run, x, use_reentrant=False))
    module(torch.ones(1, 3, requires_grad=True)).sum().backward()
    assert inner.seen == ["fetch", "fetch"]


def test_wrappers_of_a_copy_run_around_the_copy() -> None:
    module, recorder = nn.Linear(3, 3), Recorder("a")
    wrap_forward(module, recorder)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.zero_()
    assert twin(torch.ones(1, 3)).abs().sum() > 0  # the copy's weights, not the original's
    assert recorder.seen == []

    fake = fake_copy(module)
    with fake.running():
        assert type(fake.model(torch.ones(1, 3))).__name__ == "FakeTensor"
    assert recorder.seen == []

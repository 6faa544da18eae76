"""Freezing all blocks but one: which parameters require gradients, and which layers run in train mode.

    frozen prefix            active block             frozen tail
    no gradients             weight gradients         activation gradients only
    no saved activations     saved activations        saved activations
    eval mode                train mode               eval mode

Frozen layers run in eval mode. So dropout does nothing there, and the prefix computes the same values each time and
can be stored; and a frozen BatchNorm neither moves its running statistics nor depends on the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from blocktrain.chain.block import Block, Partition
from blocktrain.chain.chain import Chain
from blocktrain.chain.checkpointing import disable_hf_checkpointing, restore_hf_checkpointing
from blocktrain.modules.tied import share_gradients, unshare_gradients

# An attribute of a model whose blocks are frozen here, which its copies have too: names of the blocks' parameters.
_FROZEN_HERE = "_blocktrain_frozen"


def untrained_parameters(chain: Chain) -> frozenset[str]:
    """Names of the parameters that do not require gradients, unless that is because their block is frozen now: whoever
    made the model does not want them trained."""
    frozen_here: Collection[str] = getattr(chain.model, _FROZEN_HERE, ())
    named = {name: parameter for layer in chain.layers for name, parameter in layer.named_parameters()}
    trained = {id(parameter) for name, parameter in named.items() if parameter.requires_grad or name in frozen_here}
    return frozenset(name for name, parameter in named.items() if id(parameter) not in trained)


def activate(partition: Partition, block: Block, *, frozen_dropout: bool = False) -> None:
    """Freeze every block but `block`. The backward pass then stops by itself at the block's first layer.

    frozen_dropout: let dropout act in frozen layers too (a prefix cache is then refused).

    Until `release`, this package's activation checkpointing replaces Hugging Face's where that is on (see
    `checkpointing.py`), and an active tied weight has one gradient at a time (see `modules/tied.py`).
    """
    unshare_gradients(partition.model)
    disable_hf_checkpointing(partition)
    for module in partition.model.modules():
        # Hugging Face makes the embedding's output require a gradient whenever activation checkpointing is switched on.
        # Reentrant checkpointing needs that. Here it would send a backward pass through the frozen prefix, and save the
        # prefix's activations.
        if getattr(module, "_require_grads_hook", None) is not None:
            module.disable_input_require_grads()  # pyright: ignore[reportCallIssue]
    setattr(partition.model, _FROZEN_HERE, frozenset(partition.whole.parameters))
    active = {id(parameter) for parameter in block.parameters.values()}
    for parameter in partition.model.parameters():
        parameter.requires_grad_(id(parameter) in active)
    share_gradients(partition.model)
    set_train_modes(partition, block, frozen_dropout=frozen_dropout)


def set_train_modes(partition: Partition, block: Block, *, frozen_dropout: bool = False) -> None:
    """Put the active layers into train mode and all others into eval mode. Call it again after `model.train()` or
    `model.eval()`.

    A module that contains layers is in train mode where all blocks are active at once: some have a dropout in their own
    code (XGLM's is on the embeddings), which then acts as in ordinary training.
    """
    partition.model.train(frozen_dropout)
    if frozen_dropout:
        for module in partition.model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
    for module in block.modules():
        module.train()
    if all(layer in block.layers for other in partition for layer in other.layers):
        paths = {path for layer in block.layers for path in layer.modules}
        for container in {path[:end] for path in paths for end, letter in enumerate(path) if end == 0 or letter == "."}:
            partition.model.get_submodule(container).training = True


@dataclass(frozen=True, eq=False)
class Flags:
    """Which parameters of a model require gradients, and which modules are in train mode, at one moment."""

    requires_grad: Mapping[nn.Parameter, bool]
    training: Mapping[nn.Module, bool]

    @classmethod
    def of(cls, model: nn.Module) -> Flags:
        """Those of `model` now."""
        requires_grad = {parameter: parameter.requires_grad for parameter in model.parameters()}
        return cls(requires_grad, {module: module.training for module in model.modules()})

    def restore(self) -> None:
        """Set them as they were."""
        for parameter, flag in self.requires_grad.items():
            parameter.requires_grad_(flag)
        for module, mode in self.training.items():
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside this context every module is in eval mode; afterwards each has its previous mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def release(partition: Partition) -> None:
    """Freeze everything and free all gradients: undoes `activate`."""
    setattr(partition.model, _FROZEN_HERE, frozenset(partition.whole.parameters))
    for parameter in partition.model.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    unshare_gradients(partition.model)
    restore_hf_checkpointing(partition)


def thaw(partition: Partition) -> None:
    """Let the parameters of all blocks require gradients again, as they did when the model was cut into blocks."""
    for parameter in partition.whole.parameters.values():
        parameter.requires_grad_(True)
    vars(partition.model).pop(_FROZEN_HERE, None)

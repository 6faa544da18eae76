"""The chain of layers of a Hugging Face decoder or encoder, found by observing a forward pass, not in a table of names.

    model.decoder.embed_tokens   before the list   -> "embedding"
    model.decoder.layers.0 ...   the list          -> one layer each, under its dotted path
    model.decoder.final_...norm  after the list    -> "head"
    lm_head

The order of registration says nothing (OPT registers its final norm before its layers), and names differ between
architectures. So one forward pass of a copy without memory (see `memory/fake.py`) tells which modules run before and
after the list of layers. It also proves that the layers form a chain: each runs once, in order, and its output is the
only input of the next one that depends on the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from blocktrain.chain.chain import Chain
from blocktrain.errors import PartitionError
from blocktrain.memory.fake import fake_copy
from blocktrain.modules.wrap import wrappers_of

PROBE_TOKENS = 8


def is_huggingface(model: nn.Module) -> bool:
    """Whether `model` is a transformers model: it has a configuration that declares a number of layers."""
    config = getattr(model, "config", None)
    return hasattr(config, "model_type") and hasattr(_text_config(config), "num_hidden_layers")


def huggingface_chain(model: nn.Module) -> Chain:
    """The embedding, the transformer layers and the head of a Hugging Face model as a chain. Raises `PartitionError`,
    which says why, for a model that is not a chain of its layers."""
    path = _layer_list(model)
    count = len(cast(nn.ModuleList, model.get_submodule(path)))
    outside = list(_modules_outside(model, path))
    probe = _observe(model, path, outside)
    name = type(model).__name__
    if probe.order != list(range(count)):
        raise PartitionError(
            f"{name} calls the {count} layers of '{path}' in the order {probe.order}, not each once in order"
        )
    for faults, what in (
        (probe.broken, "does not start from the output of the layer before it"),
        (probe.leaks, "reads more of the tokens than the hidden states that it is given"),
    ):
        if faults:
            raise PartitionError(
                f"'{path}.{faults[0]}' of {name} {what}, so the model is not a chain of these layers; "
                "group the modules that belong together yourself with layers={...}"
            )

    groups = {"embedding": probe.before}
    groups |= {f"{path}.{index}": [f"{path}.{index}"] for index in range(count)}
    groups["head"] = probe.after
    for place in outside:
        runs = place in probe.before or place in probe.after
        if not runs and next(model.get_submodule(place).parameters(), None) is not None:
            raise PartitionError(
                f"'{place}' of {name} has parameters but runs neither before nor after its layers "
                f"'{path}'; say with layers={{...}} which layer it belongs to"
            )
    return Chain.of_modules(model, {name: paths for name, paths in groups.items() if paths})


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _layer_list(model: nn.Module) -> str:
    """The dotted path of the list of transformer layers: the declared one, or else the only list of the declared
    length."""
    name, config = type(model).__name__, _text_config(model.config)
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    base = getattr(model, "base_model_prefix", "")
    for key in getattr(config, "base_model_pp_plan", None) or ():
        for path in (f"{base}.{key}", key):  # a bare model, without a head, is its own base
            if path in lists:
                return path
    count = config.num_hidden_layers
    found = [path for path, module in lists.items() if len(module) == count]
    outermost = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    if len(outermost) != 1:
        which = ", ".join(outermost) or "none"
        raise PartitionError(
            f"{name} should have one list of its {count} layers, but the candidates are: {which}; "
            'name the layers in forward order: layers={"embedding": ["dotted.path"], ...}'
        )
    return outermost[0]


def _modules_outside(model: nn.Module, path: str) -> Iterator[str]:
    """The dotted paths of the largest modules that neither contain the list of layers nor lie in it."""
    ancestors = {path[:end] for end in range(len(path)) if path[end] == "."}

    def walk(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            place = f"{prefix}{name}"
            if place in ancestors:
                yield from walk(child, f"{place}.")
            elif place != path:
                yield place

    yield from walk(model, "")


@dataclass
class _Probe:
    """What one forward pass showed."""

    before: list[str] = field(default_factory=list)  # modules outside the list, in order of their first call
    after: list[str] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # layers, in order of their calls
    broken: list[int] = field(default_factory=list)  # layers whose input is not the output of the layer before
    leaks: list[int] = field(default_factory=list)  # layers that also read something else computed from the tokens
    hidden: Tensor | None = None  # output of the layer that ran last
    finished: int = 0  # layers

    def enter_layer(self, index: int, args: object, kwargs: object) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not any(leaf is self.hidden for leaf in inputs) and self.order:
            self.broken.append(index)
        elif len({id(leaf) for leaf in inputs}) > 1:
            self.leaks.append(index)
        self.order.append(index)

    def leave_layer(self, output: object) -> None:
        self.hidden = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
        self.finished += 1

    def leave_outside(self, place: str, count: int, output: object) -> None:
        """A module outside the list has returned. Only a result that is computed from the inputs counts: that of a
        dropout or a norm is; a rotary table, which belongs to no layer, is not."""
        depends = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
        if depends and place not in self.before and place not in self.after:
            if not self.order:
                self.before.append(place)
            elif self.finished >= count:
                self.after.append(place)


def _observe(model: nn.Module, path: str, outside: list[str]) -> _Probe:
    """One forward pass of a copy without memory, observed at every layer and at every module outside the list.

    Every parameter requires a gradient, so a tensor requires one if it is computed from the embedded tokens (or the
    image): hidden states do; masks, positions and rotary tables do not.
    """
    fake = fake_copy(model)
    replica, probe = fake.model.eval(), _Probe()
    for module in replica.modules():
        if not wrappers_of(module):  # a replacement by TRL or accelerate would run the model itself, not the copy
            module.__dict__.pop("forward", None)
    for parameter in replica.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    layers = cast(nn.ModuleList, replica.get_submodule(path))
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(
            lambda _module, args, kwargs, index=index: probe.enter_layer(index, args, kwargs), with_kwargs=True
        )
        layer.register_forward_hook(lambda _module, _args, output: probe.leave_layer(output))
    for place in outside:
        for module in replica.get_submodule(place).modules():
            module.register_forward_hook(
                lambda _module, _args, output, place=place: probe.leave_outside(place, len(layers), output)
            )
    what, inputs = _probe_inputs(replica)
    try:
        with fake.running(), torch.enable_grad():
            replica(**inputs)
    except Exception as error:  # whatever the model raises, the user needs to know that it was this pass
        raise PartitionError(
            f"the layers of {type(model).__name__} cannot be found: its forward pass over {what} failed "
            f"({type(error).__name__}: {error}); name them in forward order: layers={{...}}"
        ) from error
    return probe


def _probe_inputs(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """Inputs for one forward pass, and what to call them in a message: a few tokens, or a black image for a model that
    declares that it reads images."""
    device, config = next(model.parameters()).device, cast(Any, model.config)
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        shape = (1, config.num_channels, config.image_size, config.image_size)
        return "an image", {"pixel_values": torch.zeros(shape, device=device)}
    tokens = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=device)
    keeps = {"use_cache": False} if hasattr(_text_config(config), "use_cache") else {}
    return f"{PROBE_TOKENS} tokens", {"input_ids": tokens, **keeps}

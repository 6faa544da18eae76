"""The layer chain of a Hugging Face decoder or encoder, found by watching it run, not from a table of names.

    model.decoder.embed_tokens   before the list   -> "embedding"
    model.decoder.layers.0 ...   the list          -> one layer each, under its dotted path
    model.decoder.final_...norm  after the list    -> "head"
    lm_head

Registration order says nothing (OPT registers its final norm before its layers); names differ by architecture. So one
forward pass on a copy without memory (see `fake.py`) tells which modules run before and after the list of layers,
and proves that the layers form a chain: in order, each once, each one's hidden states the next one's only input.
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

PROBE_TOKENS = 8


def is_huggingface(model: nn.Module) -> bool:
    """Whether `model` looks like a transformers model: it has a config that declares a number of layers."""
    config = getattr(model, "config", None)
    return hasattr(config, "model_type") and hasattr(_text_config(config), "num_hidden_layers")


def huggingface_chain(model: nn.Module) -> Chain:
    """Embedding, transformer layers, head of a Hugging Face model; `PartitionError` says why one has no chain."""
    path = _layer_list(model)
    count = len(cast(nn.ModuleList, model.get_submodule(path)))
    outside = list(_maximal_modules_beside(model, path))
    probe = _run(model, path, outside)
    probe.check(type(model).__name__, path, count)

    groups = {"embedding": probe.before}
    groups |= {f"{path}.{index}": [f"{path}.{index}"] for index in range(count)}
    groups["head"] = probe.after
    for place in outside:
        if place not in [*probe.before, *probe.after] and _has_parameters(model.get_submodule(place)):
            raise PartitionError(
                f"'{place}' of {type(model).__name__} has parameters but runs neither before nor after its layers "
                f"'{path}'; say with layers={{...}} which layer it belongs to"
            )
    return Chain.of_modules(model, {name: paths for name, paths in groups.items() if paths})


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _layer_list(model: nn.Module) -> str:
    """Dotted path of the list of transformer layers: the declared one, else the only list of that length."""
    name, config = type(model).__name__, _text_config(model.config)
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    base = getattr(model, "base_model_prefix", "")
    for key in getattr(config, "base_model_pp_plan", None) or ():
        for path in (f"{base}.{key}", key):  # a bare model, without head, is its own base
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


def _maximal_modules_beside(model: nn.Module, path: str) -> Iterator[str]:
    """The largest modules that neither hold the list of layers nor lie in it, by dotted path."""
    ancestors = {path[:end] for end in range(len(path)) if path[end] == "."}

    def walk(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            place = f"{prefix}{name}"
            if place in ancestors:
                yield from walk(child, f"{place}.")
            elif place != path:
                yield place

    yield from walk(model, "")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


@dataclass
class _Probe:
    """What one forward pass showed."""

    before: list[str] = field(default_factory=list)  # modules beside the list, in order of their first call
    after: list[str] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # layers, in order of their calls
    broken: list[int] = field(default_factory=list)  # layers whose input is not the output before them
    leaks: list[int] = field(default_factory=list)  # layers that read another thing computed from the tokens
    hidden: Any = None  # what the last layer put out
    finished: int = 0

    def enter(self, index: int, args: Any, kwargs: Any) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not any(leaf is self.hidden for leaf in inputs) and self.order:
            self.broken.append(index)
        elif len({id(leaf) for leaf in inputs}) > 1:
            self.leaks.append(index)
        self.order.append(index)

    def leave(self, output: Any) -> None:
        self.hidden = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
        self.finished += 1

    def see(self, place: str, count: int) -> None:
        if place not in self.before and place not in self.after:
            if not self.order:
                self.before.append(place)
            elif self.finished >= count:
                self.after.append(place)

    def check(self, name: str, path: str, count: int) -> None:
        if self.order != list(range(count)):
            raise PartitionError(
                f"{name} calls the {count} layers of '{path}' in the order {self.order}, not each once in order"
            )
        for faults, what in (
            (self.broken, "does not start from what the layer before it put out"),
            (self.leaks, "reads more of the tokens than the hidden states that reach it"),
        ):
            if faults:
                raise PartitionError(
                    f"'{path}.{faults[0]}' of {name} {what}, so the model is no chain of these layers; "
                    "group the modules that belong together yourself with layers={...}"
                )


def _run(model: nn.Module, path: str, outside: list[str]) -> _Probe:
    """One forward pass of a copy without memory, watched at every layer and at every module beside the list.

    Every parameter wants a gradient, so a tensor that wants one is computed from the embedded tokens (or
    image): hidden states do, masks, positions and rotary tables do not.
    """
    fake = fake_copy(model)
    replica, probe = fake.model.eval(), _Probe()
    replica.__dict__.pop("forward", None)  # what TRL and accelerate put there runs the model itself, not its copy
    for parameter in replica.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    layers = cast(nn.ModuleList, replica.get_submodule(path))
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(
            lambda _module, args, kwargs, index=index: probe.enter(index, args, kwargs), with_kwargs=True
        )
        layer.register_forward_hook(lambda _module, _args, output: probe.leave(output))
    for place in outside:
        for module in replica.get_submodule(place).modules():
            module.register_forward_hook(
                lambda _module, _args, output, place=place: (
                    probe.see(place, len(layers)) if _on_the_path(output) else None
                )
            )
    what, inputs = _probe_inputs(replica)
    try:
        with fake.running(), torch.enable_grad():
            replica(**inputs)
    except Exception as error:  # whatever a foreign model raises, the reader needs to know that it is this pass
        raise PartitionError(
            f"the layers of {type(model).__name__} cannot be found: its forward pass over {what} failed "
            f"({type(error).__name__}: {error}); name them in forward order: layers={{...}}"
        ) from error
    return probe


def _probe_inputs(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """A few tokens, or a black image for a model that declares to read images; and what to call that."""
    device, config = next(model.parameters()).device, cast(Any, model.config)
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        shape = (1, config.num_channels, config.image_size, config.image_size)
        return "an image", {"pixel_values": torch.zeros(shape, device=device)}
    tokens = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=device)
    keeps = {"use_cache": False} if hasattr(_text_config(config), "use_cache") else {}
    return f"{PROBE_TOKENS} tokens", {"input_ids": tokens, **keeps}


def _on_the_path(output: Any) -> bool:
    """Dropout and norms are, a rotary table is not: it belongs to no layer."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))

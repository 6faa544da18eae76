"""The chain of layers of a Hugging Face model, found by observing a forward pass, not in a table of names.

    model.decoder.embed_tokens   before the layers   -> "embedding"
    model.decoder.layers.0 ...   a list of layers    -> one layer each, under its dotted path
    model.decoder.final_...norm  after the layers    -> "head"
    lm_head

The order of registration says nothing (OPT registers its final norm before its layers), and names differ between
architectures. So one forward pass of a copy without memory (see `memory/fake.py`) tells which lists of layers run, in
which order, and which modules run before and after them. An encoder with a decoder runs two lists, one after the other:

    shared                   -> "embedding"
    encoder.block.0 ... .2   -> one layer each; encoder.final_layer_norm belongs to the last one
    decoder.block.0 ... .2   -> one layer each

The same pass tells what a layer reads beside the hidden states that it is given (see `Chain.reads`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from blocktrain.chain.chain import Chain
from blocktrain.chain.freezing import Flags
from blocktrain.errors import PartitionError, first_line
from blocktrain.memory.fake import fake_copy
from blocktrain.modules.wrap import wrappers_of

log = logging.getLogger(__name__)

PROBE_TOKENS = 8


def is_huggingface(model: nn.Module) -> bool:
    """Whether `model` is a transformers model: it has a configuration that names an architecture."""
    return hasattr(getattr(model, "config", None), "model_type")


def huggingface_chain(model: nn.Module) -> Chain:
    """The embedding, the layers and the head of a Hugging Face model as a chain. Raises `PartitionError`, which says
    why, for a model that does not run each of its layers once.

    Of a model that reads images or sound beside text, the chain is what reads text. The rest is `untrained`, which is
    logged.
    """
    pass_ = _observe(model)
    name, lists = type(model).__name__, pass_.layer_lists()
    if not lists:
        raise PartitionError(
            f"{name} has no list of layers that its forward pass over {pass_.inputs} runs; name the layers in forward "
            'order: layers={"embedding": ["dotted.path"], ...}'
        )
    for path, order in lists.items():
        length = len(cast(nn.ModuleList, model.get_submodule(path)))
        if order != list(range(length)):
            raise PartitionError(
                f"{name} calls the {length} layers of '{path}' in the order {order}, not each once in order; "
                "group the modules that belong together yourself with layers={...}"
            )
    layers = [f"{path}.{index}" for path, order in lists.items() for index in order]
    groups: dict[str, list[str]] = {"embedding": [], **{layer: [layer] for layer in layers}, "head": []}
    outside = list(_modules_outside(model, lists))
    names = list(groups)
    for place, position in pass_.positions(outside, layers).items():
        groups[names[position]].append(place)
    placed = {id(p) for paths in groups.values() for path in paths for p in model.get_submodule(path).parameters()}
    left = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in placed}
    # A parameter that the model's code uses without a call of its module: who uses it is not known.
    direct = {_place_of(name, outside): None for name in left if name in pass_.used}
    groups["embedding"] = [*groups["embedding"], *direct]
    groups = {name: paths for name, paths in groups.items() if paths}
    reads = pass_.reads(groups) | {(0, len(groups) - 1) for _ in direct}
    unused = {name: parameter for name, parameter in left.items() if name not in pass_.used}
    _tell_unused(model, pass_.inputs, unused, {_place_of(name, outside): None for name in unused})
    return Chain.of_modules(model, groups, untrained=frozenset(unused), reads=frozenset(reads))


def _place_of(name: str, outside: Sequence[str]) -> str:
    """The module of `outside` that has the parameter `name`, or the parameter itself where a module that contains
    layers has it."""
    return next((place for place in outside if name.startswith(f"{place}.")), name)


def _tell_unused(model: nn.Module, inputs: str, unused: Mapping[str, nn.Parameter], parts: Iterable[str]) -> None:
    """Say which `parts` of the model have the parameters `unused`. Raises `PartitionError` for a module of them in a
    model that reads text alone: there it must belong to a layer."""
    name = type(model).__name__
    stranger = next((part for part in parts if part not in unused), None)
    if stranger is not None and not getattr(model.config, "sub_configs", None):
        raise PartitionError(
            f"'{stranger}' of {name} has parameters but does not run in a forward pass over {inputs}; say with "
            "layers={...} which layer it belongs to"
        )
    if unused:
        log.warning(
            "a forward pass over %s does not use %s of %s (%d parameters): they stay as they are; to train them, name "
            "all layers with layers={...}",
            inputs,
            ", ".join(parts),
            name,
            sum(parameter.numel() for parameter in unused.values()),
        )


def _modules_outside(model: nn.Module, lists: Iterable[str]) -> Iterator[str]:
    """The dotted paths of the largest modules that neither contain a list of layers nor lie in one; lists of other
    modules one by one."""
    ancestors = {path[:end] for path in lists for end in range(len(path)) if path[end] == "."}

    def walk(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            place = f"{prefix}{name}"
            if place in ancestors or (isinstance(child, nn.ModuleList) and place not in lists):
                yield from walk(child, f"{place}.")
            elif place not in lists:
                yield place

    yield from walk(model, "")


def _text_config(config: Any) -> Any:
    """The part of a configuration that is about text; the decoder's where there are two."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


@dataclass(eq=False)
class _Call:
    """One call of a module: the numbers of the events that begin and end it, and the tensors computed from the model's
    inputs that it is given beside the hidden states."""

    module: nn.Module
    begin: int
    beside: list[Tensor]
    end: int = -1


@dataclass(eq=False)
class _Pass:
    """What one forward pass of `model`, or of a copy, showed.

    Every parameter requires a gradient, so a tensor requires one if it is computed from the embedded tokens (or the
    image): hidden states do; masks, positions and rotary tables do not.

    inputs: what it ran over, in words.
    calls: in the order of their begins, of modules with parameters or with an output that is computed from the inputs.
        So a dropout is here, but not a rotary table, which belongs to no layer.
    used: names of the parameters that the model's output depends on.
    """

    model: nn.Module
    inputs: str
    calls: list[_Call] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def run(self, inputs: Mapping[str, Any], context: AbstractContextManager[object]) -> None:
        """Run the model and fill in what it shows."""
        running: list[_Call] = []
        events = count()

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs.get("hidden_states")
            beside = [tensor for tensor in _differentiable((args, kwargs)) if tensor is not hidden]
            running.append(_Call(module, next(events), beside))

        def leave(module: nn.Module, _args: object, output: object) -> None:
            call = running.pop()
            call.end = next(events)
            if _differentiable(output) or next(module.parameters(), None) is not None:
                self.calls.append(call)

        with ExitStack() as stack:
            for module in self.model.modules():
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            with context, torch.enable_grad():
                output = self.model(**inputs)
        self.calls.sort(key=lambda call: call.begin)
        self.used = self._parameters_behind(_differentiable(output))

    def layer_lists(self) -> dict[str, list[int]]:
        """The lists of layers in the order in which they run, and the indices of their layers in the order of calls.

        These are the outermost lists of modules that have modules of their own. A list that runs by turns with one
        before it is none (XLM has a list of attentions and one of MLPs).
        """
        lists = {
            path: module
            for path, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and any(next(layer.children(), None) is not None for layer in module)
        }
        outermost = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
        called = {path: [call for call in self.calls if call.module in set(lists[path])] for path in outermost}
        orders: dict[str, list[int]] = {}
        end = -1
        for path, calls in sorted(called.items(), key=lambda item: item[1][0].begin if item[1] else 0):
            if calls and calls[0].begin > end:
                orders[path] = [list(lists[path]).index(call.module) for call in calls]
                end = calls[-1].end
        return orders

    def positions(self, outside: Sequence[str], layers: Sequence[str]) -> dict[str, int]:
        """For each module of `outside` that runs, in the order of their first calls, when it first does: 0 is before
        all `layers`, i is after the i-th has begun, and one more than there are layers is after the last has ended."""
        first: dict[str, _Call] = {}
        for place in outside:
            parts = set(self.model.get_submodule(place).modules())
            call = next((call for call in self.calls if call.module in parts), None)
            if call is not None:
                first[place] = call
        ordered = sorted(first.items(), key=lambda item: item[1].begin)
        return {place: self._position(call, layers) for place, call in ordered}

    def reads(self, groups: Mapping[str, Sequence[str]]) -> set[tuple[int, int]]:
        """See `Chain.reads`."""
        names = list(groups)
        layers = [name for name in names if name not in ("embedding", "head")]
        offset = names.index(layers[0])
        pairs: set[tuple[int, int]] = set()
        for reader, layer in enumerate(layers, start=offset):
            for tensor in self._calls_of(layer)[0].beside:
                behind = self._parameters_behind([tensor])
                sources = [at for at, other in enumerate(layers) if any(n.startswith(f"{other}.") for n in behind)]
                pairs.add((sources[-1] + offset if sources else 0, reader))
        for source, paths in enumerate(groups.values()):
            modules = {module for path in paths if (module := self._modules.get(path)) is not None}
            for call in (call for call in self.calls if call.module in modules):
                pairs.add((source, self._position(call, layers) - 1 + offset))
        return {(source, reader) for source, reader in pairs if source < reader}

    @cached_property
    def _modules(self) -> dict[str, nn.Module]:
        return dict(self.model.named_modules(remove_duplicate=False))

    @cached_property
    def _calls_by_module(self) -> dict[nn.Module, list[_Call]]:
        calls: dict[nn.Module, list[_Call]] = {}
        for call in self.calls:
            calls.setdefault(call.module, []).append(call)
        return calls

    def _calls_of(self, path: str) -> list[_Call]:
        return self._calls_by_module.get(self._modules[path], [])

    def _position(self, call: _Call, layers: Sequence[str]) -> int:
        layer_calls = [self._calls_of(layer)[0] for layer in layers]
        if all(layer.end < call.begin for layer in layer_calls):
            return len(layers) + 1
        return sum(layer.begin <= call.begin for layer in layer_calls)

    def _parameters_behind(self, tensors: Sequence[Tensor]) -> set[str]:
        """Names of the parameters that `tensors` are computed from."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        found, nodes = set(), [tensor.grad_fn for tensor in tensors]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            if node is None:
                continue
            found.add(names.get(id(getattr(node, "variable", None))))
            following = {function for function, _ in node.next_functions} - seen
            seen |= following
            nodes += following
        return {name for name in found if name is not None}


def _differentiable(values: Any) -> list[Tensor]:
    """The tensors in `values` that are computed from the inputs, each once."""
    leaves = {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad}
    return list(leaves.values())


def _observe(model: nn.Module) -> _Pass:
    """One forward pass, of a copy without memory. A model whose code asks for numbers (how many tokens an expert got)
    runs itself, over a few tokens; it stays as it is."""
    fake = fake_copy(model)
    for module in fake.model.modules():
        if not wrappers_of(module):  # a replacement by TRL or accelerate would run the model itself, not the copy
            module.__dict__.pop("forward", None)
    what, inputs = _probe_inputs(fake.model)
    try:
        for watched, context in ((fake.model, fake.running()), (model, torch.random.fork_rng())):
            pass_ = _Pass(watched, what)
            flags = Flags.of(watched)
            watched.eval()
            for parameter in watched.parameters():
                parameter.requires_grad_(parameter.is_floating_point())
            try:
                pass_.run(inputs, context)
                return pass_
            except (DataDependentOutputException, DynamicOutputShapeException):
                if watched is model or any(parameter.is_meta for parameter in model.parameters()):
                    raise
            finally:
                flags.restore()
        raise AssertionError
    except Exception as error:  # whatever the model raises, the user needs to know that it was this pass
        raise PartitionError(
            f"the layers of {type(model).__name__} cannot be found: its forward pass over {what} failed "
            f"({first_line(error)}); name them in forward order: layers={{...}}"
        ) from error


def _probe_inputs(model: nn.Module) -> tuple[str, dict[str, Any]]:
    """Inputs for one forward pass, and what to call them in a message: a few tokens, or an image or a sound without
    contrast for a model that declares that it reads those first."""
    device, config = next(model.parameters()).device, cast(Any, model.config)
    tokens = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device=device)
    text = _text_config(config)
    inputs: dict[str, Any] = {"use_cache": False} if hasattr(text, "use_cache") else {}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
    match getattr(model, "main_input_name", "input_ids"):
        case "pixel_values":
            size = getattr(config, "image_size", 64)
            height, width = size if isinstance(size, list | tuple) else (size, size)
            return "an image", {"pixel_values": torch.zeros(1, config.num_channels, height, width, device=device)}
        case "input_features":
            shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
            return "a sound", {"input_features": torch.zeros(shape, device=device), **inputs}
        case "input_values":
            return "a sound", {"input_values": torch.zeros(1, 16_000, device=device)}
        case _:
            return f"{PROBE_TOKENS} tokens", {"input_ids": tokens, **inputs}

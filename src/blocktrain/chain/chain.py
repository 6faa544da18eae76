"""A model as a chain of layers: the only view of a model that the rest of the package needs.

    tokens -> [embedding] -> [layer 0] -> [layer 1] -> ... -> [head] -> logits
               wte, wpe       h.0          h.1                ln_f, lm_head

A `Layer` is the smallest unit a model is cut into: whole modules, in the order in which the forward pass runs them.
The model itself stays as it is and runs its own code; a chain only says which of its modules belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from blocktrain.errors import PartitionError


@dataclass(frozen=True, eq=False)
class Layer:
    """One link of a chain: modules that are trained, frozen and cut together."""

    index: int  # its position in the chain, from 0; also the index of the boundary below it
    name: str
    modules: Mapping[str, nn.Module]  # dotted path in the model -> module, in forward order
    direct: Mapping[str, nn.Parameter] = field(default_factory=dict)  # parameters of modules that contain layers

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter of the layer under its full name, tied ones included."""
        for path, module in self.modules.items():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                yield f"{path}.{name}", parameter
        yield from self.direct.items()

    def __repr__(self) -> str:
        return f"Layer({self.name})"


@dataclass(frozen=True, eq=False)
class Chain:
    """The layers of `model` in forward order. Together they hold every parameter but `untrained` ones; otherwise
    `PartitionError`.

    untrained: full names of the parameters that are not trained, because they did not require gradients when the model
        was cut into blocks (see `freezing.untrained_parameters`), or because a forward pass does not use them.
    reads: pairs (source, reader) of positions in `layers`, where a layer reads more than the hidden states that it is
        given: something that layer `source` put out, or one of its modules. Zamba's layers read the embeddings again.
    """

    model: nn.Module
    layers: tuple[Layer, ...]
    untrained: frozenset[str] = frozenset()
    reads: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        placed = {id(parameter) for layer in self.layers for _, parameter in layer.named_parameters()}
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in placed and name not in self.untrained:
                raise PartitionError(
                    f"parameter '{name}' of {type(self.model).__name__} belongs to no layer of "
                    f"{[layer.name for layer in self.layers]}; pass layers={{...}} with the module that holds it"
                )

    @classmethod
    def of_modules(
        cls,
        model: nn.Module,
        groups: Mapping[str, Sequence[str]],
        *,
        untrained: frozenset[str] = frozenset(),
        reads: frozenset[tuple[int, int]] = frozenset(),
    ) -> Chain:
        """A chain from names: `{"embedding": ["transformer.wte", "transformer.wpe"], "h.0": ["transformer.h.0"]}`.

        A path may also be that of a parameter, where a module that contains layers has one itself.

        Raises `PartitionError` for a path that is neither in `model`, and for a parameter in no layer.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        layers = []
        for index, (name, paths) in enumerate(groups.items()):
            for path in paths:
                if path not in modules and path not in parameters:
                    raise PartitionError(f"layer '{name}': {type(model).__name__} has no module '{path}'")
            found = {path: modules[path] for path in paths if path in modules}
            layers.append(Layer(index, name, found, {path: parameters[path] for path in paths if path not in modules}))
        return cls(model, tuple(layers), untrained, reads)

    @cached_property
    def owned(self) -> tuple[Mapping[str, nn.Parameter], ...]:
        """The parameters that each layer owns, by name, without the `untrained` ones. A tied parameter is owned by the
        first layer that uses it: only then does a frozen prefix stay frozen while a later block is active."""
        seen: set[int] = set()
        owned = []
        for layer in self.layers:
            mine: dict[str, nn.Parameter] = {}
            for name, parameter in layer.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    if name not in self.untrained:
                        mine[name] = parameter
            owned.append(mine)
        return tuple(owned)

    @cached_property
    def untrained_parameters(self) -> Mapping[str, nn.Parameter]:
        """The `untrained` parameters by name; tied ones once."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        once = {id(named[name]): name for name in reversed(named) if name in self.untrained}
        return {name: named[name] for name in reversed(once.values())}

"""A model that grows: its layers begin as the identity, and need not run before they are trained.

    layer       h + attention(norm(h)),  h + mlp(norm(h))
    identity    the last matrix of attention and of mlp is zero: h + 0, h + 0
    left out    h

Leaving out a layer that is the identity changes no loss and no gradient, so a step of a deep model costs only as much
as the layers that have been trained so far. Residual branches that begin at zero come from Goyal et al. 2017 (section
5.1) and Zhang et al. 2019 (Fixup); growing from shallow models comes from Gong et al. 2019 (progressive stacking).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.chain.boundary import hidden_of, pass_through
from blocktrain.chain.chain import Chain, Layer
from blocktrain.chain.freezing import evaluating
from blocktrain.errors import ConfigError
from blocktrain.modules.chunked_loss import whole_logits

_REMEDY = "leave out model.zero_residuals"


class IdentityLayers:
    """Makes all layers of `chain` but its first and its last the identity, and leaves them out where that is asked.

    batch: one row, as keyword arguments of the model; the last matrices are found with it, and the result is checked
        on it.

    Raises `ConfigError` for a model whose layers cannot begin as the identity: one with norms after the residual sum
    (BERT), or with experts. Its weights are changed by then.
    """

    def __init__(self, chain: Chain, batch: Mapping[str, Any]):
        self.layers = chain.layers[1:-1]
        self._name = type(chain.model).__name__
        self._tuple_lengths: dict[nn.Module, int] = {}  # of layer modules that return a tuple
        self._zero: set[nn.Parameter] = set()
        with evaluating(chain.model):
            last = self._last_matrices(chain, batch)
            for matrix in last:
                for parameter in matrix.parameters(recurse=False):
                    nn.init.zeros_(parameter)
                    self._zero.add(parameter)
            self._check(chain, batch, last)

    @contextmanager
    def without(self, layers: Collection[Layer]) -> Iterator[None]:
        """Inside this context, `layers` return their input. The backward pass belongs inside too."""
        with ExitStack() as stack:
            for layer in layers:
                for module in layer.modules.values():
                    stack.enter_context(pass_through(module, self._tuple_lengths.get(module)))
            yield

    def copies(self, layers: Sequence[Layer], known: Sequence[Layer]) -> dict[str, str]:
        """Which weights to copy so that `layers` begin like the last layers of `known`, in order: name of a weight ->
        name of its source. Matrices that are zero stay zero, and a weight without a counterpart of its shape stays as
        it was initialized."""
        names = {}
        for layer, source in zip(layers, itertools.cycle(known[-len(layers) :])):
            for (path, module), (place, other) in zip(layer.modules.items(), source.modules.items(), strict=True):
                there = dict(other.named_parameters())
                for name, parameter in module.named_parameters():
                    if parameter not in self._zero and name in there and there[name].shape == parameter.shape:
                        names[f"{path}.{name}"] = f"{place}.{name}"
        return names

    @torch.no_grad()
    def _last_matrices(self, chain: Chain, batch: Mapping[str, Any]) -> list[nn.Module]:
        """The last matrix of each branch: of every child of a layer that contains matrices, the one that is called
        last; and the last one of those matrices that are children themselves."""
        last: dict[tuple[str, str], nn.Module] = {}
        with ExitStack() as stack:
            for layer in self.layers:
                for path, module in layer.modules.items():
                    for name, part in module.named_modules():
                        if isinstance(weight := getattr(part, "weight", None), Tensor) and weight.dim() == 2:
                            branch, inside, _ = name.partition(".")
                            place = (path, branch if inside else "")
                            hook = part.register_forward_hook(lambda part, *_, place=place: last.update({place: part}))
                            stack.callback(hook.remove)
            chain.model(**batch)
        return list(last.values())

    def _check(self, chain: Chain, batch: Mapping[str, Any], last: list[nn.Module]) -> None:
        """Raises `ConfigError` unless every layer returns its input, and every zero matrix has a gradient."""
        changed: list[str] = []

        def compare(
            layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            if isinstance(output, tuple):
                self._tuple_lengths[module] = len(output)
                output = output[0]
            if not torch.equal(output, hidden_of(args, kwargs)):
                changed.append(layer.name)

        weights = [matrix.get_parameter("weight") for matrix in last]
        with ExitStack() as stack, torch.enable_grad():
            for layer in self.layers:
                for module in layer.modules.values():
                    hook = module.register_forward_hook(
                        lambda *call, layer=layer: compare(layer, *call), with_kwargs=True
                    )
                    stack.callback(hook.remove)
            logits = whole_logits(chain.model(**batch).logits)
            if changed or not weights:
                which = changed[0] if changed else self.layers[0].name
                raise ConfigError(
                    f"layer '{which}' of {self._name} is not the identity when the last matrix of each of its "
                    f"branches is zero; {_REMEDY}"
                )
            gradients = torch.autograd.grad(logits.float().square().sum(), weights, allow_unused=True)
        if not all(gradient is not None and gradient.any() for gradient in gradients):
            raise ConfigError(f"a branch of {self._name} whose last matrix is zero would never learn; {_REMEDY}")

"""A model that grows: layers that begin as the identity, and need not be run before they are trained.

    layer       h + attention(norm(h)),  h + mlp(norm(h))
    identity    the last matrix of attention and of mlp is zero: h + 0, h + 0
    left out    h

Leaving out what is the identity changes no loss and no gradient, so a model of many layers costs what the layers cost
that have been trained so far. Residual branches that begin at zero are Goyal et al. 2017 (section 5.1) and Zhang et al.
2019 (Fixup); growing from shallow models is Gong et al. 2019 (progressive stacking).
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


class Growth:
    """Makes all layers of `chain` but its first and its last the identity, and leaves them out where that is asked.

    The model is one that can be trained. batch: one row as keyword arguments, to find the last matrices with and to
    check on. Raises `ConfigError` for a model whose layers cannot begin so, with norms behind the residual sum (BERT)
    or with experts; it is altered then already.
    """

    def __init__(self, chain: Chain, batch: Mapping[str, Any]):
        self.layers = chain.layers[1:-1]
        self._name = type(chain.model).__name__
        self._tuples: dict[nn.Module, int] = {}  # layer module -> length of the tuple it returns, if it returns one
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
        """Inside, `layers` hand on what reaches them. The backward pass belongs inside too."""
        with ExitStack() as stack:
            for layer in layers:
                for module in layer.modules.values():
                    stack.enter_context(pass_through(module, self._tuples.get(module)))
            yield

    def copies(self, layers: Sequence[Layer], known: Sequence[Layer]) -> dict[str, str]:
        """Name of a weight -> name of the one to copy, for `layers` to begin as the last ones of `known`, in their
        order, are. What is zero stays so; what has no weight of its shape there is left as it was drawn."""
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
        """Of each child of a layer that has matrices, the one that is called last; of the matrices that are themselves
        children the last one."""
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
        """Every layer hands on what reaches it, and every zero will learn."""
        changed: list[str] = []

        def compare(
            layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            if isinstance(output, tuple):
                self._tuples[module] = len(output)
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
                    f"layer '{which}' of {self._name} is not the identity where the last matrix of each of its "
                    f"branches is zero; {_REMEDY}"
                )
            gradients = torch.autograd.grad(logits.float().square().sum(), weights, allow_unused=True)
        if not all(gradient is not None and gradient.any() for gradient in gradients):
            raise ConfigError(f"a branch of {self._name} whose last matrix is zero would never learn; {_REMEDY}")

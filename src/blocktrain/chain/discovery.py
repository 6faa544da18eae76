"""Finding the chain of a model: each kind of model has its own way to tell its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from blocktrain.chain.chain import Chain
from blocktrain.chain.huggingface import huggingface_chain, is_huggingface
from blocktrain.chain.resnet import ResNet
from blocktrain.errors import PartitionError


def find_chain(model: nn.Module, layers: Mapping[str, Sequence[str]] | None = None) -> Chain:
    """The chain of layers of `model`, which stays as it is.

    layers: `{layer name: [dotted module paths]}` in forward order, for a model that this function does not know, or
        cuts differently than you want; together they must hold every parameter.

    Without `layers` the model must be one of transformers that runs each of its layers once, an `nn.Sequential` or a
    `ResNet` of this package; otherwise this raises `PartitionError`, as it does for a model that is compiled or
    quantized already.
    """
    if hasattr(model, "_orig_mod"):
        raise PartitionError(
            "this model is the result of torch.compile, and a compiled graph does not follow which block is active: "
            "give the model itself, which is model._orig_mod"
        )
    if getattr(model, "is_quantized", False):
        method = getattr(model, "quantization_method", None)
        raise PartitionError(
            f"the weights of {type(model).__name__} are quantized ({getattr(method, 'value', method)}), and quantized "
            "weights cannot be trained: load it without a quantization_config; frozen blocks can be quantized while "
            "training (precision 'int8' or 'nf4')"
        )
    if layers is not None:
        return Chain.of_modules(model, layers)
    if isinstance(model, ResNet):
        return Chain.of_modules(model, model.layers())
    if isinstance(model, nn.Sequential):
        return Chain.of_modules(model, _children_with_parameters(model))
    if is_huggingface(model):
        return huggingface_chain(model)
    raise PartitionError(
        f"the layers of {type(model).__name__} are not known (it is not a Hugging Face transformer, an "
        'nn.Sequential or a ResNet); name them in forward order: layers={"first": ["dotted.path"], ...}'
    )


def _children_with_parameters(model: nn.Sequential) -> Mapping[str, Sequence[str]]:
    """One layer for each child with parameters. A child without any (ReLU, Flatten) joins the layer before it, or the
    first layer.

    >>> _children_with_parameters(nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    {'1': ['0', '1', '2'], '3': ['3']}
    """
    layers: dict[str, list[str]] = {}
    leading: list[str] = []  # children before the first one with parameters
    for name, child in model._modules.items():  # named_children would hide the second use of a shared child
        if child is None:
            continue
        if next(child.parameters(), None) is not None:
            layers[name] = [*leading, name]
            leading = []
        elif layers:
            layers[next(reversed(layers))].append(name)
        else:
            leading.append(name)
    if not layers:
        raise PartitionError("this nn.Sequential has no parameters: there is nothing to train in it")
    return layers

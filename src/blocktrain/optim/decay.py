"""Which parameters have no weight decay. The modules that hold them decide, never the parameters' full names."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

# (module, attribute under which it holds the parameter) -> whether this parameter has no weight decay
Undecayed = Callable[[nn.Module, str], bool]

_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)


def norms_and_biases(module: nn.Module, attribute: str) -> bool:
    """The usual choice: no decay on biases and on the weights of normalization layers.

    `nn.MultiheadAttention` and `nn.LSTM` call their biases `in_proj_bias` and `bias_ih_l0`. Hugging Face models have
    norms of their own (`LlamaRMSNorm`, `Gemma2RMSNorm`, ...), so a module is a norm if its class name ends with "norm".
    """
    return (
        "bias" in attribute.split("_") or isinstance(module, _NORMS) or type(module).__name__.lower().endswith("norm")
    )


def nothing(module: nn.Module, attribute: str) -> bool:
    """Decay every parameter."""
    return False


def undecayed_ids(model: nn.Module, undecayed: Undecayed) -> set[int]:
    """`id` of each parameter of `model` that `undecayed` names."""
    return {
        id(parameter)
        for module in model.modules()
        for attribute, parameter in module.named_parameters(recurse=False)
        if undecayed(module, attribute)
    }

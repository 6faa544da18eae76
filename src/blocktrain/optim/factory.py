"""Builds the optimizers of a block from a class and its options, and decides which parameters each takes and decays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from blocktrain.chain.block import Block, Partition
from blocktrain.dotted_path import imported_module
from blocktrain.errors import ConfigError, nearest
from blocktrain.modules.dispatch import EagerDispatchMode
from blocktrain.optim.adamw8bit import AdamW8bit
from blocktrain.optim.precision import Moments
from blocktrain.parse import shown
from blocktrain.runtime import library_errors

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


OptimizerChoice = tuple[type[torch.optim.Optimizer], dict[str, Any]]  # class, keyword arguments


class OptimizerFactory:
    """Makes optimizers for any set of a partition's parameters.

    choice: class and options. others: class and options for parameters that this class cannot take (`torch.optim.Muon`
    takes the 2-D weights of the hidden layers only); None means AdamW with the same learning rate and weight decay.
    undecayed: see `norms_and_biases`. moments: "8bit" keeps AdamW's moments in 8 bits.
    """

    def __init__(
        self,
        partition: Partition,
        choice: OptimizerChoice,
        others: OptimizerChoice | None,
        undecayed: Undecayed,
        moments: Moments = "fp32",
    ):
        self.arguments = (choice, others, undecayed)  # as given, for `BlockOptimizer.rebind`
        shared = {key: choice[1][key] for key in ("lr", "weight_decay") if key in choice[1]}
        self.choice = _with_moments(choice, moments)
        self.others = _with_moments(others or (torch.optim.AdamW, shared), moments)
        ids = undecayed_ids(partition.model, undecayed)
        self._undecayed = {
            name for block in partition for name, parameter in block.parameters.items() if id(parameter) in ids
        }
        self._matrices = hidden_matrices(partition) if issubclass(choice[0], torch.optim.Muon) else None

    def build(
        self, trained: Mapping[str, nn.Parameter], *, without: Collection[str] = ()
    ) -> list[torch.optim.Optimizer]:
        """One optimizer for `trained`, or two if the class takes matrices only. `without`: options to leave out."""
        taken = {name: p for name, p in trained.items() if self._matrices is None or name in self._matrices}
        others = {name: p for name, p in trained.items() if name not in taken}
        optimizers = []
        for (cls, options), mine in ((self.choice, taken), (self.others, others)):
            if not mine:
                continue
            groups: list[dict[str, Any]] = [{"params": list(mine.values())}]
            if "weight_decay" in inspect.signature(cls).parameters:
                decayed = [p for name, p in mine.items() if name not in self._undecayed]
                plain = [p for name, p in mine.items() if name in self._undecayed]
                groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
            chosen = {"fused": True} if _takes_fused(cls, options, mine.values()) else {}
            kept = {key: value for key, value in {**chosen, **options}.items() if key not in without}
            optimizers.append(cls([group for group in groups if group["params"]], **kept))
        return optimizers

    def state_bytes(self, block: Block, master: torch.dtype | None) -> int:
        """Bytes of state that optimizers of `block` will have, found by a step on tensors without memory."""
        trained = {
            name: nn.Parameter(block.part(name, torch.empty_like(p, dtype=master or p.dtype, device="meta")))
            for name, p in block.parameters.items()
        }
        optimizers = self.build(trained, without=("fused", "foreach", "capturable"))
        with MetaScalarsReadAsOne():
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.empty_like(parameter)
                optimizer.step()
        states = [entries for optimizer in optimizers for entries in optimizer.state.values()]
        return sum(value.nbytes for entries in states for value in entries.values() if torch.is_tensor(value))


_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # (Adagrad has a fused step on the CPU only)


def _takes_fused(
    cls: type[torch.optim.Optimizer], options: Mapping[str, Any], parameters: Iterable[nn.Parameter]
) -> bool:
    """Whether a step is one kernel unless the options say otherwise: on CUDA, where PyTorch's own default takes 4 bytes
    more for each active parameter. On a CPU a step stays, bit for bit, that of the plain class."""
    asked = {"fused", "foreach", "capturable", "differentiable"} & options.keys()
    return cls in _FUSED and not asked and all(parameter.is_cuda for parameter in parameters)


def _with_moments(choice: OptimizerChoice, moments: Moments) -> OptimizerChoice:
    """`choice`, with AdamW's two averages in 8 bits if requested. Muon keeps its one buffer as it is."""
    cls, options = choice
    if moments == "fp32" or cls in (AdamW8bit, torch.optim.Muon):
        return choice
    if cls is not torch.optim.AdamW:
        raise ConfigError(f"8-bit moments exist for AdamW only, not for {cls.__name__}; set moments='fp32'")
    return AdamW8bit, options


def find_optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class that `optimizer.name` of a configuration names.

    name: a class of `torch.optim` ("AdamW"), or any other importable subclass of `torch.optim.Optimizer` by its path:
    "package.module:Class" or "package.module.Class". Importing a module runs its code. Raises `ConfigError`.
    """
    module, _, attribute = name.replace(":", ".").rpartition(".")
    if module in ("", "torch.optim"):
        known = {
            key
            for key, value in vars(torch.optim).items()
            if isinstance(value, type)
            and issubclass(value, torch.optim.Optimizer)
            and value is not torch.optim.Optimizer
        } - {"LBFGS", "SparseAdam"}  # LBFGS needs a closure, SparseAdam sparse gradients
        if attribute not in known:
            raise ConfigError(
                f"optimizer.name '{name}' is neither a class of torch.optim that can train a block nor the path of "
                f"another one, 'package.module:Class'; {nearest(attribute, known)}"
            )
        if module:  # other settings are checked against the bare name
            raise ConfigError(f"optimizer.name '{name}': write a class of torch.optim without its path, '{attribute}'")
        return getattr(torch.optim, name)
    imported = imported_module(module, f"optimizer.name '{name}'")
    found = getattr(imported, attribute, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        classes = [
            key
            for key, value in vars(imported).items()
            if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        ]
        hint = nearest(attribute, classes) if classes else "it defines none"
        raise ConfigError(f"optimizer.name '{name}' is not a subclass of torch.optim.Optimizer in '{module}'; {hint}")
    return found


def require_options(
    name: str, cls: type[torch.optim.Optimizer], options: Mapping[str, Any], device: torch.device
) -> None:
    """Raises `ConfigError` for options that `cls`, called `name`, does not have, that are of another type than its
    defaults, or that it refuses when it is made or at a step on `device`."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key, value in options.items():
        if key in parameters:
            _require_type(f"optimizer.options.{key}", value, parameters[key])
        elif not takes_any:
            raise ConfigError(f"[optimizer] {name} has no '{key}'; {nearest(key, parameters.keys() - {'params'})}")
    given = ", ".join(f"{key} = {shown(value)}" for key, value in options.items())
    with library_errors(f"[optimizer] {name} with {given} refuses these settings"):
        weight = nn.Parameter(torch.zeros(1, 1, device=device))
        weight.grad = torch.zeros_like(weight)
        cls([weight], **options).step()


def _require_type(place: str, value: Any, parameter: inspect.Parameter) -> None:
    """Raise `ConfigError` for a value of another type than the parameter's default."""
    default = parameter.default
    if isinstance(default, tuple):
        is_right = isinstance(value, list | tuple) and len(value) == len(default)
        what = f"a list of {len(default)} numbers, such as {list(default)}"
    elif "bool" in str(parameter.annotation):
        is_right, what = isinstance(value, bool), "true or false"
    elif isinstance(default, int | float):
        is_right, what = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    else:
        return
    if not is_right:
        raise ConfigError(f"{place} must be {what}, not {shown(value)}")


def hidden_matrices(partition: Partition) -> set[str]:
    """Names of the 2-D weights of all layers except the chain's first and last, which stay with AdamW (Jordan et al.
    2024)."""
    return {name for owned in partition.chain.owned[1:-1] for name, parameter in owned.items() if parameter.ndim == 2}


def steps_parameters_independently(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step updates each parameter by its own gradient and state alone, so that it can be taken one by one.

    That is true for the classes of `torch.optim`; others may count steps once for a whole group.
    """
    return f"{type(optimizer).__module__}.".startswith("torch.optim.") or isinstance(optimizer, AdamW8bit)


class MetaScalarsReadAsOne(EagerDispatchMode):
    """Inside, a step on tensors without memory may read a number from a tensor (Adafactor reads a norm, ASGD a rate)
    and gets 1, since any number will do. Numbers in real tensors are read as they are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and (args[0].is_meta or isinstance(args[0], FakeTensor)):
            return 1.0
        return func(*args, **(kwargs or {}))

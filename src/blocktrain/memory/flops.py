"""Counted FLOPs and counted saved activations: the truth that the closed form in `chain/cost.py` is tested against.

A multiply-add is two FLOPs. Matrix products, convolutions and attention count, elementwise work does not: the formulas
and the convention are those of `torch.utils.flop_counter`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from blocktrain.errors import ConfigError, nearest
from blocktrain.memory.fake import fake_copy
from blocktrain.modules.dispatch import EagerDispatchMode
from blocktrain.modules.recompute import Recomputed, measuring_recomputed
from blocktrain.modules.wrap import wrappers_of

aten = torch.ops.aten


def _grouped_mm_flops(left, right, *_args, out_shape=None, **_kwargs) -> int:
    """(M, K) x (G, K, N) with each row in one group; or, for a weight gradient, (M, K) x (K, N) with K cut into
    groups."""
    return 2 * left[-2] * left[-1] * right[-1] * (left[0] if len(left) == len(right) == 3 else 1)


def _attention_flops(query, key, value, *_args, out_shape=None, **_kwargs) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward_flops(grad_out, query, key, value, *_args, out_shape=None, **_kwargs) -> int:
    return sdpa_backward_flop_count(grad_out, query, key, value)


# What FlopCounterMode leaves out (PyTorch 2.13): attention on a CPU, and a mixture's experts.
UNCOUNTED = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    aten._grouped_mm: _grouped_mm_flops,
}


class FlopCounter(EagerDispatchMode):
    """Counts the FLOPs of everything that runs inside, by operation, with the formulas of `FlopCounterMode`.

    `FlopCounterMode` itself also books FLOPs by module, for which it hooks every module and asks every operation
    whether it can be decomposed. On tensors without memory that takes as long as the step that is counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operation: Counter[Any] = Counter()
        self._formulas = FlopCounterMode(display=False, custom_mapping=UNCOUNTED).flop_registry

    def total(self) -> int:
        """FLOPs of all operations so far."""
        return self.by_operation.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = getattr(func, "overloadpacket", None)
        formula = self._formulas.get(operation)
        if formula is None and _can_be_decomposed(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if formula is not None:
            self.by_operation[operation] += formula(*args, **kwargs, out_val=result)
        return result


@cache
def _can_be_decomposed(func: Any) -> bool:
    """Whether an operation on tensors is made of others. Such ones are seen in inference mode, where autograd has not
    taken them apart; questions about a tensor (whether it is contiguous) are not taken apart."""
    if not isinstance(func, torch._ops.OpOverload) or not any("Tensor" in str(r.type) for r in func._schema.returns):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd)


def count_flops(fn: Callable[[], object]) -> int:
    """FLOPs of everything `fn` runs, backward passes and recomputation included."""
    with FlopCounter() as counter:
        fn()
    return counter.total()


def output_loss(output: Any) -> Tensor:
    """The loss that a model computes itself when its batch has labels."""
    return output.loss


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One forward and backward pass."""

    flops: int
    saved_bytes: int  # activations saved between the two passes, and those of the largest layer that is recomputed


class StepCounter:
    """Counts the FLOPs of one forward and backward pass of `model` over `batch`, for any choice of trained parameters.

    batch: keyword arguments of the forward call, on the model's device. loss: from the model's output to a scalar.

    It counts on a copy without memory, so the model's gradients, `requires_grad` flags, buffers and random numbers do
    not change. The state of the model when the counter is made matters: in train mode, attention dropout takes another
    kernel on a CPU (whose backward counts as 2 forwards instead of 2.5), and activation checkpointing recomputes.
    """

    def __init__(self, model: nn.Module, batch: Mapping[str, Any], loss: Callable[[Any], Tensor] = output_loss):
        self._fake = fake_copy(model)
        self._batch = dict(batch)
        self._loss = loss
        self._parameters = dict(self._fake.model.named_parameters(remove_duplicate=False))

    def forward(self) -> int:
        """FLOPs of a forward pass alone."""
        with torch.no_grad():
            return self._count(lambda: self._fake.model(**self._batch))

    def full(self) -> int:
        """FLOPs of a step that trains every parameter."""
        return self.training(self._parameters)

    def training(self, names: Collection[str]) -> int:
        """FLOPs of a step that trains exactly the parameters `names`; a tied parameter may have any of its names."""
        return self.measure(names).flops

    def measure(self, names: Collection[str]) -> StepCost:
        """FLOPs of a step that trains exactly the parameters `names`, and the bytes that its forward pass saves for the
        backward pass.

        A layer that is recomputed (see `modules/recompute.py`) saves its inputs, and the backward pass then needs all
        activations of one layer at a time: the bytes are those inputs, and the activations of the largest such layer.

        Raises `ConfigError` for a name that is not a parameter.
        """
        unknown = [name for name in names if name not in self._parameters]
        if unknown:
            raise ConfigError(
                f"{type(self._fake.model).__name__} has no parameter '{unknown[0]}'; "
                f"{nearest(unknown[0], self._parameters)}"
            )
        trained = {id(self._parameters[name]) for name in names}
        for parameter in self._parameters.values():
            parameter.requires_grad_(id(parameter) in trained and parameter.is_floating_point())
        weights = (*self._parameters.values(), *self._fake.model.buffers())
        saved = 0

        def step() -> None:
            nonlocal saved
            losses: list[Tensor] = []
            saved = saved_bytes(lambda: losses.append(self._loss(self._fake.model(**self._batch))), excluding=weights)
            losses[0].backward()

        try:
            with torch.enable_grad():
                flops = self._count(step)
                return StepCost(flops=flops, saved_bytes=saved + self._largest_recomputed(weights))
        finally:
            self._fake.model.zero_grad(set_to_none=True)

    def _largest_recomputed(self, weights: Sequence[Tensor]) -> int:
        """The most bytes that one recomputed module saves beside its inputs; 0 where no module is recomputed."""
        if not any(
            isinstance(around, Recomputed) for module in self._fake.model.modules() for around in wrappers_of(module)
        ):
            return 0
        largest = 0

        def measure(run: Callable[[], Any], inputs: list[Tensor]) -> Any:
            nonlocal largest
            outputs: list[Any] = []
            largest = max(largest, saved_bytes(lambda: outputs.append(run()), excluding=(*weights, *inputs)))
            return outputs[0]

        with self._fake.running(), measuring_recomputed(measure):
            self._fake.model(**self._batch)
        return largest

    def _count(self, fn: Callable[[], object]) -> int:
        with self._fake.running():
            return count_flops(fn)


def saved_bytes(fn: Callable[[], object], *, excluding: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd saves for the backward pass while `fn` runs a forward pass, on real or on fake tensors.

    Each storage counts once and whole, however many views of it are saved. Storages of `excluding` do not count: the
    model's parameters and buffers are in memory anyway. A layer under activation checkpointing saves only its inputs,
    not what its backward pass will compute again.
    """
    excluded = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in excluding}
    saved: dict[int, torch.UntypedStorage] = {}  # keeps the storages alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(storage.nbytes() for storage in saved.values())

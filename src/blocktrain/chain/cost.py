"""The FLOPs of each layer, and from them the FLOPs of a step in closed form.

A step costs, for layer j with w_j FLOPs in its weights and a_j in attention, which multiplies activations only:

    forward               w_j + a_j           every layer
    activation gradients  w_j + b_j           the first active layer and every layer above it
    weight gradients      w_j                 layers whose weights are active
    recomputation         r_j                 layers under activation checkpointing, from the first active one on

b_j is 2.5 a_j with a fused attention kernel, which computes the scores again (5 matrix products instead of 2; this is
how `FlopCounterMode` counts it), and 2 a_j where attention is two plain matrix products. With M equal blocks and
without attention, block k costs (2M - k + 1) / (3M) of a full step. r_j is w_j + a_j less what the backward pass does
not need, such as a layer's last product if only sums follow it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blocktrain.chain.chain import Chain
from blocktrain.errors import PartitionError
from blocktrain.memory.fake import fake_copy
from blocktrain.memory.flops import FlopCounter

aten = torch.ops.aten

# Matrix products of two activations; every other counted operation has a weight for an operand.
MATMUL_ATTENTION = {aten.bmm, aten.baddbmm}
FUSED_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._flash_attention_forward,
    aten._efficient_attention_forward,
}


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer's share of a step, in FLOPs."""

    name: str
    parameters: int  # scalars the layer owns; a tied weight counts where it is used first
    forward_flops_weights: int  # w_j: also the price of its activation gradients, and of its weight gradients
    forward_flops_attention: int  # a_j
    backward_flops_attention: int  # b_j
    recompute_flops: int = 0  # r_j
    owner: int  # the layer that owns the weights multiplied here: this one, or the embedding for a tied head

    @property
    def forward_flops(self) -> int:
        """FLOPs of the layer's forward pass."""
        return self.forward_flops_weights + self.forward_flops_attention


def layer_costs(chain: Chain, batch: Mapping[str, Any]) -> tuple[LayerCost, ...]:
    """The FLOPs of each layer in one forward pass over `batch` (keyword arguments), counted on a copy without memory.

    What runs between two layers counts towards the first of them, and what runs before all layers towards the first
    layer, so the sum is the whole forward pass. With dropout, r_j may differ between train and eval mode; it is counted
    in the mode that the layer is in.
    """
    counts, needed = _forward_counts(chain, batch)
    owner = {id(parameter): index for index, mine in enumerate(chain.owned) for parameter in mine.values()}
    costs = []
    for index, layer in enumerate(chain.layers):
        matmul = sum(flops for op, flops in counts[index].items() if op in MATMUL_ATTENTION)
        fused = sum(flops for op, flops in counts[index].items() if op in FUSED_ATTENTION)
        largest = max((p for _, p in layer.named_parameters() if p.dim() > 1), key=lambda p: p.numel(), default=None)
        costs.append(
            LayerCost(
                name=layer.name,
                parameters=sum(parameter.numel() for parameter in chain.owned[index].values()),
                forward_flops_weights=counts[index].total() - matmul - fused,
                forward_flops_attention=matmul + fused,
                backward_flops_attention=2 * matmul + fused * 5 // 2,
                recompute_flops=needed[index],
                owner=index if largest is None else owner[id(largest)],
            )
        )
    return tuple(costs)


def theoretical_step_flops(
    costs: Sequence[LayerCost],
    active: Collection[int] | Mapping[int, float] | None = None,
    *,
    first_layer: int = 0,
    checkpointed: Collection[int] = (),
) -> int:
    """The FLOPs of one step in closed form.

    active: indices of the layers that are trained, or {index: trained share of its weights}; None means all of them.
    first_layer: where the forward pass starts, if a prefix cache has the output of the layers below.
    checkpointed: layers that are recomputed if gradients flow through them.

    The result is within 2 % of the counted FLOPs for decoders that normalize before their first matrix product. Layer 0
    reads data, so it has no activation gradients. Where no trained parameter comes before a later layer's first product
    (ResNet, plain Linear layers, OLMo 2), autograd skips the activation gradient of that product when the layer is the
    first active one; this formula still counts it.

    Raises `PartitionError` for an active layer that does not exist, or that lies below `first_layer`.
    """
    active = range(len(costs)) if active is None else active
    shares = active if isinstance(active, Mapping) else dict.fromkeys(active, 1.0)
    if not active or not all(0 <= index < len(costs) for index in active):
        raise PartitionError(f"active layers {sorted(active)} must be some of 0 to {len(costs) - 1}")
    first = min(active)
    if not 0 <= first_layer <= first:
        raise PartitionError(f"the forward pass cannot start at layer {first_layer}: layer {first} is active")
    forward = sum(cost.forward_flops for cost in costs[first_layer:])
    weights = sum(
        cost.forward_flops_weights
        if shares[cost.owner] == 1
        else round(cost.forward_flops_weights * shares[cost.owner])
        for cost in costs
        if cost.owner in shares
    )
    backward = sum(
        cost.backward_flops_attention + (cost.forward_flops_weights if index > 0 else 0)
        for index, cost in enumerate(costs)
        if index >= first
    )
    recomputed = sum(costs[index].recompute_flops for index in checkpointed if index >= first)
    return forward + backward + weights + recomputed


def _forward_counts(chain: Chain, batch: Mapping[str, Any]) -> tuple[list[Counter[object]], list[int]]:
    """For each layer its FLOPs by operation, and its FLOPs up to the last tensor that it saves for the backward pass.

    Entering a module of a layer closes the account of the layer before it.
    """
    fake = fake_copy(chain.model)
    accounts: list[Counter[object]] = [Counter() for _ in chain.layers]
    needed = [0] * len(accounts)
    current, booked = 0, Counter()

    def enter(index: int, counter: FlopCounter, *_call: object) -> None:
        nonlocal current, booked
        total = counter.by_operation.copy()
        accounts[current] += total - booked
        current, booked = index, total

    def save(tensor: Tensor) -> Tensor:
        needed[current] = accounts[current].total() + counter.total() - booked.total()
        return tensor

    for parameter in fake.model.parameters():  # PyTorch chooses some operations by whether gradients are required
        parameter.requires_grad_(parameter.is_floating_point())
    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with fake.running(), torch.enable_grad(), hooks, FlopCounter() as counter:
        for index, layer in enumerate(chain.layers):
            for path in layer.modules:
                for module in fake.model.get_submodule(path).modules():
                    module.register_forward_pre_hook(partial(enter, index, counter))
        fake.model(**batch)
        enter(current, counter)
    return accounts, needed

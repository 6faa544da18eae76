"""Sharding: every weight in equal parts over the processes, for models whose frozen weights do not fit one card.

    at rest       each process has 1/P of every weight (FSDP2, `fully_shard`)
    layer runs    its weights are gathered, used, and dropped; in a frozen layer nothing comes back
    backward      of an active layer: gradients are added up, each process is given its part
    step          the optimizer moves its part of the active block, whose moments are parts too

Layers are sharded once. A switch of block only changes which parameters want gradients, and gradients travel for these
alone. Layers that share a tied weight are gathered together, for the whole of a step.

The rows of a step are shared as in data parallel training (`parallel.py`), and gradients are summed, not averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from blocktrain.chain.block import Block, Partition
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.chain.chain import Chain, Layer
from blocktrain.errors import ConfigError
from blocktrain.parallel.data_parallel import (
    DTYPES,
    Active,
    DistributedConfig,
    ReplicatedBase,
    average,
    batch_norm_statistics,
)
from blocktrain.parallel.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """In what gathered weights and gradients travel; the parts themselves keep the model's precision.

    compute_dtype: of gathered weights and of what is computed with them. reduce_dtype: of gradients on their way.
    """

    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"


class ShardedPartition:
    """A partition whose parameters are parts. Sharding changes the model for good.

    partition: the same blocks and names; give this one to `BlockOptimizer`, with a precision without masters (the
        parts are fp32, and `ShardingConfig` says what is computed in). Every forward pass is one of all processes.
    """

    def __init__(
        self, ranks: Ranks, partition: Partition, config: ShardingConfig, *, device: torch.device | None = None
    ):
        """device: where the parts are to be; by default where the model is. A model on the host goes there layer by
        layer."""
        if ranks.size == 1:
            raise ConfigError("sharding needs more than one process: start it with torchrun --nproc-per-node 2")
        require_whole(partition)
        model = partition.model
        device = device or next(model.parameters()).device
        mesh = init_device_mesh(device.type, (ranks.size,))
        whole = list(model.parameters())
        _shard(partition.chain, mesh, config)
        for parameter in whole:  # which others may still refer to
            parameter.data = parameter.data.new_empty(0)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.partition = Partition(
            Chain(model, partition.chain.layers),
            tuple(
                replace(block, parameters={name: parameters[name] for name in block.parameters}) for block in partition
            ),
        )

    def full_weights(self, block: Block) -> dict[str, Tensor]:
        """The whole weights of `block` on the host. All processes must call this."""
        return {name: _whole(parameter.detach()) for name, parameter in block.parameters.items()}

    def gathered(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """A `BlockOptimizer.state_dict()` of parts as that of one process. All processes must call this."""
        return _states(saved, lambda _, value: _whole(value) if isinstance(value, DTensor) else value)

    def scattered(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """A `BlockOptimizer.state_dict()` of one process as this process's parts; what has a weight's shape is cut."""
        parameters = {name: parameter for block in self.partition for name, parameter in block.parameters.items()}

        def part(name: str, value: Any) -> Any:
            like = cast(DTensor, parameters[name])
            if not isinstance(value, Tensor) or value.shape != like.shape:
                return value
            # Every process has read the whole of it: nothing needs to be sent.
            return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

        return _states(saved, part)


def require_whole(partition: Partition) -> None:
    """Raise `ConfigError` where a block has some rows of a parameter only."""
    for block in partition:
        if block.rows:
            name = next(iter(block.rows))
            raise ConfigError(f"{block} owns rows of '{name}', which cannot be sharded; take larger blocks")


class ShardedBoundaryRunner(BoundaryRunner):
    """Runs parts of a sharded model; like any forward pass of it, on all processes together.

    What has begun at the model itself FSDP expects to end there. A pass that stops at a boundary begins behind it.
    """

    def _run_until_stopped(self, batch: Mapping[str, Any]) -> None:
        root = cast(FSDPModule, self.chain.model)
        root.unshard()
        try:
            self.chain.model.forward(**batch)
        finally:
            root.reshard()


class FSDPSteps(ReplicatedBase):
    """Gradients are summed by FSDP2 as each layer's backward pass ends; every rank moves its parts of the block."""

    settled = True

    def __init__(self, ranks: Ranks, config: DistributedConfig):
        super().__init__(ranks, config)
        self._statistics: list[Tensor] = []

    @contextmanager
    def visit(self, active: Active) -> Iterator[None]:
        """Nothing to exchange: no part is on two ranks."""
        self._active, self._statistics = active, batch_norm_statistics(active.block)
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            with self.ranks.peers():  # FSDP's own collectives, which know nothing of `Ranks`
                raise

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Only what no gradient moves is left to do."""
        yield
        average(self.ranks, self._statistics)

    def stepped(self, step: int) -> None:
        """All ranks have taken the same step."""

    def clip_grad_norm(self, max_norm: float) -> float:
        """Over the parts of all ranks."""
        return float(_whole(self._in_visit().clip_grad_norm(max_norm)))


def _shard(chain: Chain, mesh: DeviceMesh, config: ShardingConfig) -> None:
    """Each layer by itself; those that share weights with another are left to the model as a whole."""
    policy = MixedPrecisionPolicy(
        param_dtype=None if config.compute_dtype == "fp32" else DTYPES[config.compute_dtype],
        reduce_dtype=DTYPES[config.reduce_dtype],
    )
    for layer in chain.layers:
        if not _is_tied(chain, layer):
            fully_shard(list(layer.modules.values()), mesh=mesh, mp_policy=policy)
    fully_shard(chain.model, mesh=mesh, mp_policy=policy)
    for module in chain.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other, and no scaling is asked for
    root = cast(FSDPModule, chain.model)
    root.set_reduce_scatter_unused_params(True)  # an expert that has no rows on this process
    # FSDP takes note, once, of the precision of what is trainable at the first forward pass: of one block alone, the
    # others' gradients would stay in bf16 (PyTorch 2.13). So it is told while everything is.
    for parameter in chain.model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    root._get_fsdp_state()._lazy_init()
    # After a forward pass its own weights stay gathered, for the backward pass. Where none comes, they are given back.
    chain.model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else root.reshard())


def _is_tied(chain: Chain, layer: Layer) -> bool:
    mine = {id(parameter) for _, parameter in layer.named_parameters()}
    return any(
        id(parameter) in mine
        for other in chain.layers
        if other is not layer
        for _, parameter in other.named_parameters()
    )


def _whole(value: Tensor) -> Tensor:
    """On the host. Parts that wait there are gathered through their device."""
    if isinstance(value, DTensor):
        on_device = cast(DTensor, value.to(value.device_mesh.device_type))
        return on_device.full_tensor().cpu()
    return value.cpu()


def _states(saved: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """`saved` with each block's optimizer state changed, entry by entry."""
    blocks = {
        index: {name: {key: change(name, value) for key, value in entries.items()} for name, entries in state.items()}
        for index, state in saved["blocks"].items()
    }
    return {**saved, "blocks": blocks}

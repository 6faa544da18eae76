"""FSDP2: every weight is sharded over the ranks, for models whose frozen weights do not fit on one card.

    between uses      each rank has 1/P of every weight (`fully_shard`)
    a layer runs      its weights are all-gathered, used, and freed; a frozen layer has no gradients to send
    backward          the gradients of an active layer are reduce-scattered: each rank has its shard of their sum
    step              the optimizer updates its shard of the active block, and its moments are sharded too

Layers are sharded once. A switch of block only changes which parameters require gradients, and only their gradients are
reduce-scattered. Layers that share a tied weight are gathered together, for the whole of a step.

Each rank has its own rows of a step, as in data parallel training, and gradients are summed, not averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from blocktrain.chain.block import Block, Partition
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.chain.chain import Chain, Layer
from blocktrain.errors import ConfigError
from blocktrain.parallel.config import TORCH_DTYPES, DistributedConfig, ShardingConfig
from blocktrain.parallel.protocol import BatchParallel, TrainedBlock
from blocktrain.parallel.ranks import Ranks
from blocktrain.parallel.replicas import average_over_ranks, batch_norm_statistics


class ShardedPartition:
    """A partition whose parameters are sharded. Sharding changes the model for good.

    partition: blocks of equal layers and parameter names, with sharded parameters. Pass this one to `BlockOptimizer`,
        with a precision without masters: the shards are fp32, and `ShardingConfig` has the dtype of the computation.

    From now on every forward pass is collective.
    """

    def __init__(
        self, ranks: Ranks, partition: Partition, config: ShardingConfig, *, device: torch.device | None = None
    ):
        """device: of the shards; by default the model's. A model on the host is moved there layer by layer."""
        if ranks.size == 1:
            raise ConfigError("sharding needs more than one process: start it with torchrun --nproc-per-node 2")
        require_shardable(partition)
        self.ranks = ranks
        model = partition.model
        device = device or next(model.parameters()).device
        mesh = init_device_mesh(device.type, (ranks.size,))
        unsharded = list(model.parameters())
        _shard(partition.chain, mesh, config)
        for parameter in unsharded:  # others may still refer to these: free their memory
            parameter.data = parameter.data.new_empty(0)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.partition = Partition(
            replace(partition.chain, model=model),
            tuple(
                replace(block, parameters={name: parameters[name] for name in block.parameters}) for block in partition
            ),
        )

    def gather_weights(self, block: Block) -> dict[str, Tensor]:
        """The unsharded weights of `block`, on the host of rank 0; nothing on the other ranks. Collective."""
        gathered = {name: self._gather(parameter.detach()) for name, parameter in block.parameters.items()}
        return {name: weight for name, weight in gathered.items() if weight is not None}

    def gather_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A sharded `BlockOptimizer.state_dict()` as a single process would have it, on the host of rank 0. Collective.

        The other ranks get it without the sharded tensors.
        """
        return _map_entries(state, lambda _, value: self._gather(value) if isinstance(value, DTensor) else value)

    def shard_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The `BlockOptimizer.state_dict()` of a single process, sharded: each tensor that has its weight's shape."""
        parameters = {name: parameter for block in self.partition for name, parameter in block.parameters.items()}

        def shard(name: str, value: Any) -> Any:
            like = cast(DTensor, parameters[name])
            if not isinstance(value, Tensor) or value.shape != like.shape:
                return value
            # Every rank has read the whole tensor, so nothing needs to be sent.
            return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

        return _map_entries(state, shard)

    def _gather(self, value: Tensor) -> Tensor | None:
        """The unsharded tensor on the host of rank 0, and None on the others, which only send their shard."""
        assert isinstance(value, DTensor)
        shard = {"": value.to_local().contiguous()}
        shards = [load(data)[""] for data in self.ranks.gather_bytes(save(shard))]
        return torch.cat(shards).view(value.shape) if shards else None


def require_shardable(partition: Partition) -> None:
    """Raise `ConfigError` where a block owns only some rows of a parameter."""
    for block in partition:
        if block.rows:
            name = next(iter(block.rows))
            raise ConfigError(f"{block} owns rows of '{name}', which cannot be sharded; take larger blocks")


class ShardedBoundaryRunner(BoundaryRunner):
    """Runs layers of a sharded model. Collective, like any forward pass of it.

    FSDP expects a forward pass that enters the root module to leave it too. A pass that stops at a boundary does not,
    so it calls the root's `forward` without the root's hooks.
    """

    def _run_until_stopped(self, batch: Mapping[str, Any]) -> None:
        root = cast(FSDPModule, self.chain.model)
        root.unshard()
        try:
            self.chain.model.forward(**batch)
        finally:
            root.reshard()


class ShardedDataParallel(BatchParallel):
    """FSDP2 sums the gradients as each layer's backward pass ends; every rank updates its shard of the block."""

    def __init__(self, ranks: Ranks, config: DistributedConfig):
        super().__init__(ranks, config)
        self._statistics: list[Tensor] = []

    @contextmanager
    def visit(self, active: TrainedBlock) -> Iterator[None]:
        """There is nothing to compare at the end, because no shard is on two ranks."""
        self._active, self._statistics = active, batch_norm_statistics(active.block)
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            with self.ranks.peer_errors():  # it came from FSDP's own collectives, which do not use `Ranks`
                raise

    @contextmanager
    def gradient_sync(self) -> Iterator[None]:
        """FSDP2 has summed the gradients; only BatchNorm statistics, which have none, remain to be averaged."""
        yield
        average_over_ranks(self.ranks, self._statistics)

    def clip_grad_norm(self, max_norm: float) -> Tensor | float:
        """See `Parallel`; the norm is that of the shards of all ranks."""
        norm = self._in_visit().clip_grad_norm(max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _shard(chain: Chain, mesh: DeviceMesh, config: ShardingConfig) -> None:
    """Shard each layer by itself; layers that share weights with another are sharded with the model as a whole."""
    policy = MixedPrecisionPolicy(
        param_dtype=None if config.compute_dtype == "fp32" else TORCH_DTYPES[config.compute_dtype],
        reduce_dtype=TORCH_DTYPES[config.reduce_dtype],
    )
    for layer in chain.layers:
        if not _is_tied(chain, layer):
            fully_shard(list(layer.modules.values()), mesh=mesh, mp_policy=policy)
    fully_shard(chain.model, mesh=mesh, mp_policy=policy)
    for module in chain.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo can only sum, and no scaling is wanted
    root = cast(FSDPModule, chain.model)
    root.set_reduce_scatter_unused_params(True)  # such as those of an expert without rows on this rank
    # FSDP records once, at the first forward pass, the dtype of the parameters that are trainable then. If these were
    # one block's only, the gradients of the other blocks would stay in bf16 (PyTorch 2.13). So it records them now,
    # while all parameters are trainable.
    for parameter in chain.model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    root._get_fsdp_state()._lazy_init()
    # After a forward pass the root's own weights stay gathered for the backward pass. Without one they are freed here.
    chain.model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else root.reshard())


def _is_tied(chain: Chain, layer: Layer) -> bool:
    own = {id(parameter) for _, parameter in layer.named_parameters()}
    return any(
        id(parameter) in own
        for other in chain.layers
        if other is not layer
        for _, parameter in other.named_parameters()
    )


def _map_entries(state_dict: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """`state_dict` with `change(parameter name, value)` in place of each value of each block's optimizer state; values
    that become None are left out."""

    def changed(name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        values = {key: change(name, value) for key, value in entries.items()}
        return {key: value for key, value in values.items() if value is not None}

    blocks = {
        index: {name: changed(name, entries) for name, entries in state.items()}
        for index, state in state_dict["blocks"].items()
    }
    return {**state_dict, "blocks": blocks}

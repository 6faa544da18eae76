"""`BlockOptimizer`: any `torch.optim` class, on one block at a time (paper Algorithm 1, lines 5 to 8).

with optimizer.visit(block):      freeze the others, unfreeze `block`, build its optimizer
    loss.backward()               gradients exist for `block` alone
    optimizer.step()
    optimizer.zero_grad()
                                  retire: state to the store, gradients freed, everything frozen
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, get_args

import torch
from torch import Tensor, nn

from blocktrain.chain.block import Block, Partition
from blocktrain.chain.freezing import activate, release, thaw
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.modules.int8_linear import FrozenCompute, Int8Layers
from blocktrain.optim.active_block import ActiveBlock
from blocktrain.optim.block_weights import BlockWeights
from blocktrain.optim.factory import OptimizerChoice, OptimizerFactory, Undecayed, norms_and_biases
from blocktrain.optim.master import LowBits
from blocktrain.optim.precision import FP32, Precision
from blocktrain.optim.state_store import BlockState, Drop, StateStore, to_host
from blocktrain.optim.step_in_backward import BackwardUpdate, StepInBackward
from blocktrain.optim.weight_store import OnDevice, WeightLocation


class BlockOptimizer:
    """Optimizes one block of a partition at a time with an optimizer class of PyTorch's.

    partition: the blocks of the model to train. Constructing freezes the whole model, until `close`. Parameters that
        are in no block (see `partition`) are never trained; they have the precision and the place of frozen weights.
    optimizer_class, **kwargs: as you would construct it for the whole model; a new one is built at each visit.
        `weight_decay` is exactly the value given, on every parameter except those that `undecayed` names. Classes that
        take matrices only (`torch.optim.Muon`) get the 2-D weights of the hidden layers; `others` gets all other
        parameters, and those of the first and the last layer.
    state: where the moments are stored between visits: `Drop()`, `KeepOnHost()`, `KeepOnDisk(folder)`.
    precision: `FP32`; or weights in less than fp32 and an fp32 master of the active block only: `BF16_EXACT`, `BF16`
        (masters are rebuilt at each visit), `INT8`, `NF4` (frozen weights are quantized, exact masters on the host).
    frozen: where frozen weights are stored, `OnDevice()` or `OnHost()`. Reading weights that are quantized or on the
        host raises `StoredWeightError` outside the forward pass: see `block_weights`, `model.state_dict()` and `close`.
    frozen_compute: "int8" computes the frozen linear layers' forward pass and activation gradients in int8, all but
        those of the chain's last layer, while the active block is in train mode; in eval mode everything is exact. It
        takes one byte for each frozen weight in addition, none with `INT8`. See `modules/int8_linear.py`.
    undecayed: (module, attribute name) -> True for parameters without weight decay; by default norms and biases, unlike
        `AdamW(model.parameters())`, which decays them too (so does `optim.factory.nothing`).
    frozen_dropout: let dropout act in frozen layers.
    others: (class, keyword arguments) for parameters that `optimizer_class` cannot take.
    tail: updates other weights inside each backward pass, such as `bt.Tail` (see `BackwardUpdate`).
    device: where the model is trained; by default where it is. A model on the host goes there weight by weight, in the
        form in which frozen weights are stored, so the device never holds more than training needs.
    in_backward: update each weight during the backward pass; a step is then one backward pass (`step_in_backward.py`).

    Device memory during a visit, in addition to the weights (`weight_bytes`): gradients and state of the active block,
    and its master if there is one. A parameter without a gradient (an expert that no token chose) is left as it is.
    """

    def __init__(
        self,
        partition: Partition,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        state: StateStore | None = None,
        precision: Precision = FP32,
        frozen: WeightLocation = OnDevice(),  # noqa: B008 - a value
        frozen_compute: FrozenCompute = "exact",
        undecayed: Undecayed = norms_and_biases,
        frozen_dropout: bool = False,
        others: OptimizerChoice | None = None,
        tail: BackwardUpdate | None = None,
        in_backward: bool = False,
        device: torch.device | None = None,
        **kwargs: Any,
    ):
        if not isinstance(partition, Partition):
            raise ConfigError(f"a {type(partition).__name__} is no partition: give bt.partition(model, num_blocks=3)")
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
            raise ConfigError(f"{optimizer_class!r} is no optimizer class: give one such as torch.optim.AdamW")
        self.partition = partition
        self.factory = OptimizerFactory(partition, (optimizer_class, kwargs), others, undecayed, precision.moments)
        self.store: StateStore = state if state is not None else Drop()
        self.precision = precision
        self.frozen = frozen
        self.frozen_compute: FrozenCompute = frozen_compute
        self.frozen_dropout = frozen_dropout
        self.tail = tail
        self.in_backward = in_backward
        self.steps = 0
        self.changed_at = [0] * len(partition)  # by block: the step that last updated it
        # The states of blocks that were active in the checkpoint that was loaded, until their next activation.
        self._pending: dict[int, BlockState] = {}
        self._active: ActiveBlock | None = None
        self._updated: list[int] = []  # the blocks that steps of this visit update
        # What updates weights inside each backward pass, in the order in which it acts.
        self.backward_updates = [*([] if tail is None else [tail]), *([StepInBackward()] if in_backward else [])]
        for update in self.backward_updates:
            update.require(partition, precision, frozen)
        self.predicted_state_bytes(partition[0])  # arguments that the class refuses are refused here
        self._require_frozen_compute()
        release(partition)
        head = partition.chain.layers[-1].modules.values()
        int8 = Int8Layers(partition.model, exact=head, device=device) if frozen_compute == "int8" else None
        self._weights = BlockWeights(partition, precision, frozen, device, int8)
        self.store.clear()

    def rebind(self, partition: Partition) -> BlockOptimizer:
        """An optimizer with the same arguments for another partition (of a copy of the model); it drops all state."""
        (cls, options), others, undecayed = self.factory.arguments
        return BlockOptimizer(
            partition,
            cls,
            precision=self.precision,
            frozen=self.frozen,
            frozen_compute=self.frozen_compute,
            undecayed=undecayed,
            frozen_dropout=self.frozen_dropout,
            others=others,
            tail=self.tail,
            in_backward=self.in_backward,
            **options,
        )

    def _require_frozen_compute(self) -> None:
        """Raise `ConfigError` where frozen layers cannot compute as `frozen_compute` says."""
        compute = f"frozen_compute = {self.frozen_compute!r}"
        if self.frozen_compute not in get_args(FrozenCompute):
            raise ConfigError(f"{compute} is unknown; give one of {', '.join(get_args(FrozenCompute))}")
        if self.frozen_compute == "exact":
            return
        if not isinstance(self.frozen, OnDevice):
            raise ConfigError(f"{compute} computes with weights on the device: set frozen = 'device', not 'host'")
        if self.precision.frozen == "nf4":
            raise ConfigError(f"{compute} does not compute with 4-bit weights: set precision = 'int8', not 'nf4'")
        if self.tail is not None:
            raise ConfigError(f"{compute}, but {self.tail.setting} updates frozen weights in each step: leave one out")

    # -- visits ---------------------------------------------------------------------------------------------------

    def visit(self, block: Block) -> AbstractContextManager[BlockOptimizer]:
        """Train `block` inside the `with`: one of the partition's blocks or a union of several. Visits do not nest."""
        return _Visit(self, block)

    def _enter(self, block: Block, updates: ExitStack) -> None:
        """Activate `block`; updates: gets what ends the backward updates of this visit."""
        if self._active is not None:
            raise ConfigError(f"{block} cannot be activated: the visit to {self._active.block} is still open")
        if block not in self.partition:
            raise ConfigError(f"{block} is not a block of this optimizer's partition; visit one of {self.partition}")
        self._activate(block)
        try:
            for update in self.backward_updates:
                updates.enter_context(update.updating(self.partition, self.active_block))
        except BaseException:
            self._retire()
            raise

    def prefetch_state(self, block: Block) -> None:
        """The next visit will be to `block`: start to read its state, where that takes time. This is only a hint."""
        here = () if self._active is None else self._active.block.members
        for index in sorted(set(block.members).difference(here)):
            self.store.prefetch(index)

    def _activate(self, block: Block) -> None:
        activate(self.partition, block, frozen_dropout=self.frozen_dropout)
        masters = self._weights.activate(block)
        trained = masters.parameters if masters else block.parameters
        active = ActiveBlock(block, trained, self.factory.build(trained), masters)
        for index in block.members:
            state = self._pending[index] if index in self._pending else self.store.get(index)
            self._pending.pop(index, None)
            if state is not None:
                active.restore(state)
        tail = self.tail_of(block).keys()
        above = [other.index for other in self.partition if tail & other.parameters.keys()]
        self._active, self._updated = active, [*block.members, *above]

    def _retire(self) -> None:
        active, self._active = self.active_block, None
        block = active.block
        self._weights.retire(block, active.masters)
        release(self.partition)
        try:
            for index in block.members:
                self.store.put(index, active.state(self.partition[index]))
        finally:
            del active  # frees masters and moments, before quantizing takes memory
            self._weights.store(block)

    # -- inside a visit -------------------------------------------------------------------------------------------

    @property
    def block(self) -> Block | None:
        """The block that is being trained; None between visits."""
        return None if self._active is None else self._active.block

    @property
    def active_block(self) -> ActiveBlock:
        """What exists for the active block only: trained parameters, gradients, optimizers and their state. Raises
        `ConfigError` between visits."""
        if self._active is None:
            raise ConfigError("no block is active: use 'with optimizer.visit(block):'")
        return self._active

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The active optimizers' groups, as in `torch.optim.Optimizer`."""
        return self.active_block.param_groups

    def step(self) -> None:
        """One optimizer step on the active block. With masters this frees the gradients."""
        self.active_block.step()
        self.steps += 1
        for index in self._updated:
            self.changed_at[index] = self.steps

    def zero_grad(self) -> None:
        """Free the active block's gradients, including those of masters, which `model.zero_grad()` does not know."""
        self.active_block.zero_grad()

    def gradients(self) -> list[Tensor]:
        """Gradients of the active block, in the precision in which they are accumulated."""
        return self.active_block.gradients()

    def clip_grad_norm(self, max_norm: float = float("inf")) -> Tensor:
        """Scale the active block's gradients to a total 2-norm of at most `max_norm`; returns the norm before (0-d).
        With `in_backward` the gradients are already used: any `max_norm` but `inf` raises `ConfigError`."""
        return self.active_block.clip_grad_norm(max_norm)

    def scale_learning_rate(self, factor: float) -> None:
        """Set every group's learning rate to `factor` times the rate that it was built with."""
        for group in self.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def state_bytes(self) -> int:
        """Bytes of the active optimizers' state tensors (for Adam: both moments and the step counts)."""
        return sum(tensor.nbytes for tensor in self.active_block.tensors()["moments"])

    # -- for any block --------------------------------------------------------------------------------------------

    def tail_of(self, block: Block) -> dict[str, nn.Parameter]:
        """The parameters, by name, that a visit to `block` updates beyond its own; with `bt.Tail` all those above."""
        return {
            name: parameter
            for update in self.backward_updates
            for name, parameter in update.also_updates(self.partition, block).items()
        }

    def tensors(self) -> dict[str, list[Tensor]]:
        """All tensors in addition to the model's own, by part of memory: the visit's "master", "gradients" and
        "moments"; "frozen" weights that are quantized; on the "host", what is stored there of frozen blocks."""
        return {**self._weights.tensors(), **({} if self._active is None else self._active.tensors())}

    def predicted_state_bytes(self, block: Block) -> int:
        """What `state_bytes` will be in a visit to `block`, found by a step on tensors without memory."""
        return self.factory.state_bytes(block, self.precision.master)

    def weight_bytes(self, block: Block) -> int:
        """Device memory of the model's weights in a visit to `block`, without layers that are materialized as they
        run."""
        return self._weights.device_bytes(block)

    def copy_weights(self, sources: Mapping[str, str]) -> None:
        """Give weights (keys: names) the values of others (values: names), between visits."""
        self._require_between_visits("copying")
        self._weights.copy(sources)
        touched = [block.index for block in self.partition if sources.keys() & block.parameters.keys()]
        self.changed_at = [self.steps if index in touched else at for index, at in enumerate(self.changed_at)]

    def close(self) -> None:
        """Turn the model into an ordinary one again, every weight on its device, and those of the blocks require
        gradients. The optimizer cannot be used after that."""
        self._require_between_visits("closing")
        self._weights.close()
        thaw(self.partition)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """Plain values: the active blocks (none between visits), steps taken, the step that last updated each block.

        Blocks that were active in the checkpoint that was loaded count as active until their next activation.
        """
        return {
            "active": list(self._pending if self._active is None else self._active.block.members),
            "steps": self.steps,
            "changed_at": list(self.changed_at),
        }

    def block_state(self, index: int) -> BlockState | None:
        """Block `index`'s optimizer state on the host; must not be changed. A copy if the block is active, else what is
        stored for it; None if there is none."""
        if self._active is not None and index in self._active.block.members:
            return to_host(self._active.state(self.partition[index]))
        return self._pending[index] if index in self._pending else self.store.get(index)

    def has_state(self, index: int) -> bool:
        """Whether `block_state` would return something, without reading it."""
        is_active = self._active is not None and index in self._active.block.members
        return is_active or index in self._pending or self.store.holds(index)

    def block_weights(self, index: int) -> dict[str, Tensor]:
        """Block `index`'s weights as training left them, before quantizing, on the host; must not be changed."""
        return self._weights.weights(self.partition[index])

    def load_block_weights(self, index: int, weights: Mapping[str, Tensor]) -> None:
        """Replace block `index`'s weights, between visits; raises `CheckpointError` if one is missing."""
        self._require_between_visits("loading")
        self._weights.load_weights(self.partition[index], weights)

    def block_low_bits(self, index: int) -> LowBits:
        """The bits of block `index`'s fp32 masters that its weights lack (int16); empty where they are not kept."""
        active = self._active
        if active is not None and index in active.block.members and active.masters is not None:
            return active.masters.low_bits(self.partition[index].parameters)
        return self._weights.low_bits[index]

    def has_low_bits(self, index: int) -> bool:
        """Whether `block_low_bits` would return something, without computing it."""
        is_active = self._active is not None and index in self._active.block.members
        return self.precision.has_master if is_active else bool(self._weights.low_bits[index])

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model's weights: `progress`, and each block's state and low bits."""
        return {
            **self.progress(),
            "blocks": {at: self.block_state(at) for at in range(len(self.partition)) if self.has_state(at)},
            "low_bits": {block.index: self.block_low_bits(block.index) for block in self.partition},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, between visits; the model's weights must be restored separately.

        Everything stored before is forgotten. The state of blocks that were active when it was saved is used at their
        next activation, whatever the store does with state.
        """
        self._require_between_visits("loading")
        _require_matching(saved, self.partition, self.precision)
        self.store.clear()
        self._pending = {index: state for index, state in saved["blocks"].items() if index in saved["active"]}
        for index, state in saved["blocks"].items():
            if index not in self._pending:
                self.store.put(index, state)
        self.steps = saved["steps"]
        self.changed_at = list(saved["changed_at"])
        self._weights.low_bits = [dict(saved["low_bits"].get(block.index, {})) for block in self.partition]

    def load_progress(self, active: Mapping[int, tuple[BlockState | None, LowBits]]) -> None:
        """Continue, between visits, where a visit was left: for each block (by index) the state and the low bits that
        it had then. Its next activation uses them, whatever the store and the precision keep."""
        self._require_between_visits("loading")
        for index, (state, low_bits) in active.items():
            if state is not None:
                self._pending[index] = state
            self._weights.low_bits[index] = low_bits

    def _require_between_visits(self, what: str) -> None:
        if self._active is not None:
            raise ConfigError(f"{self._active.block} is active: leave its visit before {what}")


class _Visit(AbstractContextManager[BlockOptimizer]):
    """The context of a visit. It is no generator: Python would close a generator that nobody leaves when it collects
    it, so a visit would retire in the midst of another one, or in an interpreter that ends and can make no tensors."""

    def __init__(self, optimizer: BlockOptimizer, block: Block):
        self.optimizer = optimizer
        self.block = block
        self._updates = ExitStack()

    def __enter__(self) -> BlockOptimizer:
        with ExitStack() as updates:
            self.optimizer._enter(self.block, updates)
            self._updates = updates.pop_all()
        return self.optimizer

    def __exit__(self, *error: Any) -> None:
        try:
            self._updates.__exit__(*error)
        finally:
            self.optimizer._retire()


def _require_matching(saved: Mapping[str, Any], partition: Partition, precision: Precision) -> None:
    """Raise `CheckpointError` unless a saved state has this partition's blocks and what this precision needs."""
    if len(saved["changed_at"]) != len(partition):
        raise CheckpointError(
            f"the saved optimizer has {len(saved['changed_at'])} blocks, this partition has {len(partition)}"
        )
    for block in partition:
        unknown = saved["blocks"].get(block.index, {}).keys() - block.parameters.keys()
        if unknown:
            raise CheckpointError(f"the saved block {block.index} holds '{min(unknown)}', which is not in this block")
        # A block that was active has low bits with any master; a frozen block only where they are kept.
        was_active, low_bits = block.index in saved["active"], saved["low_bits"].get(block.index, {})
        needed = precision.has_master if was_active else precision.keeps_low_bits
        expected = block.parameters.keys() if needed else set()
        if low_bits.keys() != expected:
            raise CheckpointError(
                f"the saved block {block.index} has low bits of {len(low_bits)} parameters, precision "
                f"'{precision.name}' needs {len(expected)}; resume with the precision it was saved with"
            )

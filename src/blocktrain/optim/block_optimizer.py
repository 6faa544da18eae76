"""`BlockOptimizer`: any `torch.optim` class, on one block at a time (paper Algorithm 1, lines 5 to 8).

with optimizer.visit(block):      freeze the others, unfreeze `block`, build its optimizer
    loss.backward()               gradients exist for `block` alone
    optimizer.step()
    optimizer.zero_grad()
                                  retire: state to the store, gradients gone, everything frozen
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.chain.block import Block, Partition
from blocktrain.chain.freezing import activate, release
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.optim.active_block import Active
from blocktrain.optim.decay import Undecayed, norms_and_biases
from blocktrain.optim.factory import OptimizerChoice, OptimizerFactory, hidden_matrices
from blocktrain.optim.frozen_weights import FrozenWeights
from blocktrain.optim.in_backward import REASON, require_single_process, stepping
from blocktrain.optim.learning_tail import Tail, moving, require_possible
from blocktrain.optim.master import LowBits
from blocktrain.optim.offloaded_weights import FrozenPlace, OnDevice
from blocktrain.optim.precision import FP32, Precision
from blocktrain.optim.state import BlockState, Drop, Kept, StateStore, to_host


class BlockOptimizer:
    """Optimizes one block of a partition at a time with an optimizer class of PyTorch's.

    partition: of the model to train. Constructing freezes the whole model.
    optimizer_class, **kwargs: as you would construct it for the whole model; a new one is built at each visit.
        `weight_decay` is exactly the value given, on every parameter but those that `undecayed` names.
        Classes that take matrices only (`torch.optim.Muon`) get the 2-D weights of the hidden layers; the rest (and
        the first and last layer) go to `others`.
    state: what becomes of the moments between visits: `Drop()`, `KeepOnHost()`, `KeepOnDisk(folder)`.
    precision: `FP32`; or weights in less and an fp32 master of the active block only: `BF16_EXACT`, `BF16` (masters
        rebuilt at each visit), `INT8`, `NF4` (frozen weights packed, exact masters on the host).
    frozen: where frozen weights rest, `OnDevice()` or `OnHost()`. Offloaded weights read as NaN outside of
        the forward pass: see `block_weights`, `model.state_dict()` and `close`.
    undecayed: (module, attribute name) -> True for parameters without weight decay.
    frozen_dropout: let dropout act in frozen layers.
    others: (class, keyword arguments) for parameters that `optimizer_class` cannot take.
    tail: how what lies above the active block is moved in each backward pass, if at all (see `tail.py`).
    in_backward: step each weight in the backward pass, of which there must be one a step (see `in_backward.py`).

    Device memory during a visit, beside the weights (`weight_bytes`): gradients and state of the active block, and its
    master if there is one. A parameter without gradient (an expert that no token chose) is left as it is.
    """

    def __init__(
        self,
        partition: Partition,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        state: StateStore | None = None,
        precision: Precision = FP32,
        frozen: FrozenPlace = OnDevice(),  # noqa: B008 - a value
        undecayed: Undecayed = norms_and_biases,
        frozen_dropout: bool = False,
        others: OptimizerChoice | None = None,
        tail: Tail | None = None,
        in_backward: bool = False,
        **kwargs: Any,
    ):
        _require_kinds(partition, optimizer_class)
        if tail is not None:
            require_possible(tail, partition, precision, frozen)
        if in_backward:
            require_single_process(REASON)
        self.partition = partition
        self.factory = OptimizerFactory(partition, (optimizer_class, kwargs), others, undecayed, precision.moments)
        self.store: StateStore = state if state is not None else Drop()
        self.precision = precision
        self.frozen = frozen
        self.frozen_dropout = frozen_dropout
        self.tail = tail
        self.in_backward = in_backward
        self.steps = 0
        self.changed_at = [0] * len(partition)  # the step that last moved each block
        self._kept = Kept(self.store)
        self._active: Active | None = None
        self.predicted_state_bytes(partition[0])  # arguments that the class refuses are refused here
        release(partition)
        self._frozen = FrozenWeights(partition, precision, frozen)
        self.store.clear()

    def over(self, partition: Partition) -> BlockOptimizer:
        """One made like this, over another partition (of a copy of the model), that keeps no moments."""
        (cls, options), others, undecayed = self.factory.arguments
        ours = {name: getattr(self, name) for name in ("precision", "frozen", "frozen_dropout", "tail", "in_backward")}
        return BlockOptimizer(partition, cls, others=others, undecayed=undecayed, **ours, **options)

    # -- visits ---------------------------------------------------------------------------------------------------

    @contextmanager
    def visit(self, block: Block) -> Iterator[BlockOptimizer]:
        """Train `block`, one of the partition's or a union of several, inside the `with`. Visits do not nest."""
        if self._active is not None:
            raise ConfigError(f"{block} cannot be activated: {self._active.block} still is; leave its visit first")
        if block not in self.partition:
            raise ConfigError(f"{block} is not a block of this optimizer's partition; visit one of {self.partition}")
        is_finalizing = sys.is_finalizing  # while the interpreter ends, the module's own names are None
        self._activate(block)
        tail, matrices = self.tail_of(block), hidden_matrices(self.partition)
        try:
            with (
                moving(self.tail, tail, matrices=matrices, learning_rate=lambda: self.param_groups[0]["lr"]),
                stepping(self.in_visit) if self.in_backward else nullcontext(),
            ):
                yield self
        finally:
            if not is_finalizing():  # a script that ends inside a visit: PyTorch makes no tensors any more
                self._retire()

    def expect(self, block: Block) -> None:
        """The next visit will be to `block`: begin to read its state, where that takes time. Only a hint."""
        here = () if self._active is None else self._active.block.members
        for index in sorted(set(block.members).difference(here)):
            self.store.prefetch(index)

    def _activate(self, block: Block) -> None:
        activate(self.partition, block, frozen_dropout=self.frozen_dropout)
        masters = self._frozen.activate(block)
        trained = masters.parameters if masters else block.parameters
        active = Active(block, trained, self.factory.build(trained), masters)
        for index in block.members:
            if (state := self._kept.take(index)) is not None:
                active.restore(state)
        self._active = active

    def _retire(self) -> None:
        active, self._active = self.in_visit, None
        block = active.block
        self._frozen.retire(block, active.masters)
        release(self.partition)
        try:
            for index in block.members:
                self.store.put(index, active.state(self.partition[index]))
        finally:
            del active  # masters and moments make room for packing
            self._frozen.offload(block)

    # -- inside a visit -------------------------------------------------------------------------------------------

    @property
    def active(self) -> Block | None:
        """The block being trained, None between visits."""
        return None if self._active is None else self._active.block

    @property
    def in_visit(self) -> Active:
        """What exists of the active block alone: what is trained, its gradients and its state."""
        if self._active is None:
            raise ConfigError("no block is active: use 'with optimizer.visit(block):'")
        return self._active

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The active optimizers' groups, as in `torch.optim.Optimizer`."""
        return [group for optimizer in self.in_visit.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """One optimizer step on the active block. With masters it uses the gradients up."""
        active = self.in_visit
        active.step()
        self.steps += 1
        members = active.block.members
        for index in members if self.tail is None else range(members[0], len(self.partition)):
            self.changed_at[index] = self.steps

    def zero_grad(self) -> None:
        """Free the active block's gradients; its masters' too, which `model.zero_grad()` does not know."""
        self.in_visit.zero_grad()

    def gradients(self) -> list[Tensor]:
        """Gradients of the active block, in the precision they are accumulated in."""
        return self.in_visit.gradients()

    def clip_grad_norm(self, max_norm: float = float("inf")) -> Tensor:
        """Scale the active block's gradients to a total 2-norm of at most `max_norm`; returns the norm before (0-d).
        With `in_backward` they have been used: only `inf` is taken."""
        return self.in_visit.clip_grad_norm(max_norm)

    def scale_learning_rate(self, factor: float) -> None:
        """Set every group's rate to `factor` times the rate it was built with."""
        for group in self.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def tensors(self) -> dict[str, list[Tensor]]:
        """What this optimizer holds beside the model's own tensors, by part of memory: the visit's "master",
        "gradients" and "moments"; "frozen" weights that are packed; on the "host", what frozen blocks have there."""
        return {**self._frozen.tensors(), **({} if self._active is None else self._active.tensors())}

    def state_bytes(self) -> int:
        """Bytes of the active optimizer's state tensors (for Adam: both moments and the step counts)."""
        return self.in_visit.state_bytes()

    def predicted_state_bytes(self, block: Block) -> int:
        """What `state_bytes` will be in a visit to `block`: a step is taken on tensors without memory."""
        return self.factory.state_bytes(block, self.precision.master)

    def copy_weights(self, sources: Mapping[str, str]) -> None:
        """Give weights (keys: names) the values of others (values: names), between visits."""
        self._require_between_visits("copying")
        self._frozen.copy(sources)
        touched = [block.index for block in self.partition if sources.keys() & block.parameters.keys()]
        self.changed_at = [self.steps if index in touched else at for index, at in enumerate(self.changed_at)]

    def tail_of(self, block: Block) -> dict[str, nn.Parameter]:
        """What moves beside `block` in a visit to it: every parameter of the blocks above, if there is a `tail`."""
        return self.partition.parameters_above(block) if self.tail is not None else {}

    def weight_bytes(self, block: Block) -> int:
        """Device bytes of the model's weights in a visit to `block`, less those that are awake for a layer's run."""
        return self._frozen.device_bytes(block)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Plain values: the active blocks (none between visits), steps taken, the step that last moved each block.
        Blocks that were active when what was loaded was saved count as active until their next activation."""
        return {
            "active": list(self._kept.waiting if self._active is None else self._active.block.members),
            "steps": self.steps,
            "changed_at": list(self.changed_at),
        }

    def block_state(self, index: int) -> BlockState | None:
        """Block `index`'s optimizer state on the host, not to be changed: the active one's own (a copy), else what was
        kept of it; None where there is none."""
        if self._active is not None and index in self._active.block.members:
            return to_host(self._active.state(self.partition[index]))
        return self._kept.get(index)

    def has_state(self, index: int) -> bool:
        """Whether `block_state` would return something, without reading it."""
        active = self._active is not None and index in self._active.block.members
        return active or self._kept.holds(index)

    def block_weights(self, index: int) -> dict[str, Tensor]:
        """Block `index`'s weights as training left them, packed or not, on the host and not to be changed."""
        return self._frozen.weights(self.partition[index])

    def load_block_weights(self, index: int, weights: Mapping[str, Tensor]) -> None:
        """Replace block `index`'s weights, between visits; raises `CheckpointError` if one is missing."""
        self._require_between_visits("loading")
        self._frozen.load_weights(self.partition[index], weights)

    def block_low_bits(self, index: int) -> LowBits:
        """What the weights of block `index` leave out of its fp32 values (int16); empty where nothing is kept of it."""
        active = self._active
        if active is not None and index in active.block.members and active.masters is not None:
            return active.masters.low_bits(self.partition[index].parameters)
        return self._frozen.low_bits(self.partition[index])

    def has_low_bits(self, index: int) -> bool:
        """Whether `block_low_bits` would return something, without making it."""
        is_active = self._active is not None and index in self._active.block.members
        return self.precision.has_master if is_active else bool(self._frozen.low_bits(self.partition[index]))

    def close(self) -> None:
        """Give the model back as an ordinary one, every weight awake on its device; the optimizer's work is over."""
        self._require_between_visits("closing")
        self._frozen.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything beyond the model's weights: position, and each block's state and low_bits."""
        return {
            **self.position(),
            "blocks": {at: self.block_state(at) for at in range(len(self.partition)) if self.has_state(at)},
            "low_bits": {block.index: self.block_low_bits(block.index) for block in self.partition},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, between visits, the model's weights apart. The state of blocks that were
        active then is used at their next activation, whatever the store does; what it held before is gone."""
        self._require_between_visits("loading")
        _check(saved, self.partition, self.precision)
        self._kept.load(saved["blocks"], active=saved["active"])
        self.steps = saved["steps"]
        self.changed_at = list(saved["changed_at"])
        self._frozen.load_low_bits([dict(saved["low_bits"].get(block.index, {})) for block in self.partition])

    def _require_between_visits(self, what: str) -> None:
        if self._active is not None:
            raise ConfigError(f"{self._active.block} is active: leave its visit before {what}")


def _check(saved: Mapping[str, Any], partition: Partition, precision: Precision) -> None:
    if len(saved["changed_at"]) != len(partition):
        raise CheckpointError(
            f"the saved optimizer has {len(saved['changed_at'])} blocks, this partition {len(partition)}"
        )
    for block in partition:
        low_bits, mid_visit = saved["low_bits"].get(block.index, {}), block.index in saved["active"]
        _check_state(block, saved["blocks"].get(block.index, {}))
        _check_low_bits(block, low_bits, precision, mid_visit=mid_visit)


def _check_state(block: Block, state: BlockState) -> None:
    unknown = state.keys() - block.parameters.keys()
    if unknown:
        raise CheckpointError(f"the saved block {block.index} holds '{min(unknown)}', which is not in this block")


def _check_low_bits(block: Block, low_bits: LowBits, precision: Precision, *, mid_visit: bool) -> None:
    """A block that was active has low_bits with any master, another one only where they are kept."""
    needed = precision.has_master if mid_visit else precision.keeps_low_bits
    expected = block.parameters.keys() if needed else set()
    if low_bits.keys() != expected:
        raise CheckpointError(
            f"the saved block {block.index} has low_bits of {len(low_bits)} parameters, precision "
            f"'{precision.name}' needs {len(expected)}; resume with the precision it was saved with"
        )


def _require_kinds(partition: object, optimizer_class: object) -> None:
    if not isinstance(partition, Partition):
        raise ConfigError(f"a {type(partition).__name__} is no partition: give bt.partition(model, num_blocks=3)")
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise ConfigError(f"{optimizer_class!r} is no optimizer class: give one such as torch.optim.AdamW")

"""`BlockOptimizer`: any `torch.optim` class, on one block at a time (paper Algorithm 1, lines 5 to 8).

with optimizer.visit(block):      freeze the others, unfreeze `block`, build its optimizer
    loss.backward()               gradients exist for `block` alone
    optimizer.step()
    optimizer.zero_grad()
                                  retire: state to the store, gradients gone, everything frozen
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from blocktrain.blocks.activation import activate, release
from blocktrain.blocks.block import Block, Partition
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.optim.active import Active
from blocktrain.optim.decay import Undecayed, norms_and_biases
from blocktrain.optim.master import Masters, Remainders, lower
from blocktrain.optim.precision import FP32, Precision
from blocktrain.optim.recipe import OptimizerChoice, Recipe, step_without_memory
from blocktrain.optim.state import BlockState, Drop, StateStore, to_host


class BlockOptimizer:
    """Optimizes one block of a partition at a time with an optimizer class of PyTorch's.

    partition: of the model to train. Constructing freezes the whole model.
    optimizer_class, **kwargs: as you would construct it for the whole model; a new one is built at each visit.
        `weight_decay` is exactly the value given, on every parameter but those that `undecayed` names.
        Classes that take matrices only (`torch.optim.Muon`) get the 2-D weights of the hidden layers; the rest (and
        the first and last layer) go to `others`.
    state: what becomes of the moments between visits: `Drop()`, `KeepOnHost()`, `KeepOnDisk(folder)`.
    precision: `FP32`, or `BF16_EXACT`: weights in bf16, an fp32 master of the active block only.
    undecayed: (module, attribute name) -> True for parameters without weight decay.
    frozen_dropout: let dropout act in frozen layers.
    others: (class, keyword arguments) for parameters that `optimizer_class` cannot take.

    Device memory during a visit, beside the weights: gradients and state of the active block, and with `BF16_EXACT`
    its master. A parameter without gradient (an expert that no token chose) is left as it is.
    """

    def __init__(
        self,
        partition: Partition,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        state: StateStore | None = None,
        precision: Precision = FP32,
        undecayed: Undecayed = norms_and_biases,
        frozen_dropout: bool = False,
        others: OptimizerChoice | None = None,
        **kwargs: Any,
    ):
        self.partition = partition
        self.recipe = Recipe(partition, (optimizer_class, kwargs), others, undecayed)
        self.store: StateStore = state if state is not None else Drop()
        self.precision = precision
        self.frozen_dropout = frozen_dropout
        self.steps = 0
        self.changed_at = [0] * len(partition)  # the step that last moved each block
        left_out = lower(partition.whole.parameters) if precision.has_master else {}
        self._remainders: list[Remainders] = [
            {name: block.part(name, left_out[name]) for name in block.parameters if left_out} for block in partition
        ]
        self._resumed: tuple[int, BlockState] | None = None  # of the block that was active when it was saved
        self._active: Active | None = None
        _require_dtype(partition, precision)
        self.store.clear()
        release(partition)
        self.predicted_state_bytes(partition[0])  # arguments that the class refuses are refused here

    # -- visits ---------------------------------------------------------------------------------------------------

    @contextmanager
    def visit(self, block: Block) -> Iterator[BlockOptimizer]:
        """Train `block` inside the `with`; everything else is frozen. Visits do not nest."""
        if self._active is not None:
            raise ConfigError(f"{block} cannot be activated: {self._active.block} still is; leave its visit first")
        if block not in self.partition.blocks:
            raise ConfigError(f"{block} is not a block of this optimizer's partition; visit one of {self.partition}")
        self._activate(block)
        try:
            yield self
        finally:
            self._retire()

    def _activate(self, block: Block) -> None:
        activate(self.partition, block, frozen_dropout=self.frozen_dropout)
        masters = Masters(block, self._remainders[block.index]) if self.precision.has_master or block.rows else None
        trained = masters.parameters if masters else block.parameters
        active = Active(block, trained, self.recipe.build(trained), masters)
        state = self._state_to_restore(block)
        if state is not None:
            active.restore(state)
        self._active = active

    def _retire(self) -> None:
        active = self._require_active()
        self._active = None
        if active.masters is not None:
            self._remainders[active.block.index] = active.masters.close()
        release(self.partition)
        self.store.put(active.block.index, active.state())

    def _state_to_restore(self, block: Block) -> BlockState | None:
        state = self.block_state(block.index)
        if self._resumed is not None and self._resumed[0] == block.index:
            self._resumed = None
        return state

    def _require_active(self) -> Active:
        if self._active is None:
            raise ConfigError("no block is active: use 'with optimizer.visit(block):'")
        return self._active

    # -- inside a visit -------------------------------------------------------------------------------------------

    @property
    def active(self) -> Block | None:
        """The block being trained, None between visits."""
        return None if self._active is None else self._active.block

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The active optimizers' groups, as in `torch.optim.Optimizer`."""
        return [group for optimizer in self._require_active().optimizers for group in optimizer.param_groups]

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """By name, what the optimizer moves: the active block's weights, or their masters; gradients end up here."""
        return self._require_active().trained

    def entries(self) -> dict[str, dict[str, Any]]:
        """By name, the optimizer's own state of each of them, live."""
        return self._require_active().entries()

    def step(self) -> None:
        """One optimizer step on the active block."""
        active = self._require_active()
        for optimizer in active.optimizers:
            optimizer.step()
        self.write_weights()
        self.steps += 1
        self.changed_at[active.block.index] = self.steps

    def write_weights(self) -> None:
        """Give the model what the masters hold, where there are any."""
        active = self._require_active()
        if active.masters is not None:
            active.masters.write_weights()

    def zero_grad(self) -> None:
        """Free the active block's gradients; its masters' too, which `model.zero_grad()` does not know."""
        for optimizer in self._require_active().optimizers:
            optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """Gradients of the active block, in the precision they are accumulated in."""
        return [p.grad for p in self._require_active().trained.values() if p.grad is not None]

    def clip_grad_norm(self, max_norm: float = float("inf")) -> Tensor:
        """Scale the active block's gradients to a total 2-norm of at most `max_norm`; returns the norm before (0-d)."""
        norm = torch.nn.utils.get_total_norm(self.gradients())
        if max_norm != float("inf"):
            torch.nn.utils.clip_grads_with_norm_(self._require_active().trained.values(), max_norm, norm)
        return norm

    def scale_learning_rate(self, factor: float) -> None:
        """Set every group's rate to `factor` times the rate it was built with."""
        for group in self.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def state_bytes(self) -> int:
        """Bytes of the active optimizer's state tensors (for Adam: both moments and the step counts)."""
        return self._require_active().state_bytes()

    def predicted_state_bytes(self, block: Block) -> int:
        """What `state_bytes` will be in a visit to `block`: a step is taken on tensors without memory."""
        trained = {
            name: nn.Parameter(torch.empty_like(block.part(name, p), dtype=self._trained_dtype(p), device="meta"))
            for name, p in block.parameters.items()
        }
        optimizers = self.recipe.build(trained, without=("fused", "foreach", "capturable"))
        step_without_memory(optimizers)
        return Active(block, trained, optimizers).state_bytes()

    def _trained_dtype(self, weight: nn.Parameter) -> torch.dtype:
        return torch.float32 if self.precision.has_master else weight.dtype

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Plain values: the active block (None between visits), steps taken, the step that last moved each block.

        A block that was active when what was loaded was saved counts as active until its next activation.
        """
        waiting = None if self._resumed is None else self._resumed[0]
        return {
            "active": waiting if self._active is None else self._active.block.index,
            "steps": self.steps,
            "changed_at": list(self.changed_at),
        }

    def block_state(self, index: int) -> BlockState | None:
        """Block `index`'s optimizer state on the host, not to be changed: the active one's own (a copy), else what was
        kept of it; None where there is none."""
        if self._active is not None and self._active.block.index == index:
            return to_host(self._active.state())
        if self._resumed is not None and self._resumed[0] == index:
            return self._resumed[1]
        return self.store.get(index)

    def has_state(self, index: int) -> bool:
        """Whether `block_state` would return something, without reading it."""
        active = self._active is not None and self._active.block.index == index
        resumed = self._resumed is not None and self._resumed[0] == index
        return active or resumed or self.store.holds(index)

    def block_remainders(self, index: int) -> Remainders:
        """What the weights of block `index` leave out of its fp32 values (int16); empty in fp32."""
        active = self._active
        if active is not None and active.block.index == index and active.masters is not None:
            return active.masters.remainders()
        return self._remainders[index]

    def state_dict(self) -> dict[str, Any]:
        """Everything beyond the model's weights: position, and each block's state and remainders."""
        states = {block.index: self.block_state(block.index) for block in self.partition}
        return {
            **self.position(),
            "blocks": {index: state for index, state in states.items() if state is not None},
            "remainders": {block.index: self.block_remainders(block.index) for block in self.partition},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, between visits; the model's weights are restored separately.

        The state of the block that was active then is used at its next activation, whatever the store does. What the
        store held before is gone.
        """
        if self._active is not None:
            raise ConfigError(f"{self._active.block} is active: leave its visit before loading")
        if len(saved["changed_at"]) != len(self.partition):
            raise CheckpointError(
                f"the saved optimizer has {len(saved['changed_at'])} blocks, this partition {len(self.partition)}"
            )
        for block in self.partition:
            self._check_fits(block, saved["blocks"].get(block.index, {}), saved["remainders"].get(block.index, {}))
        self.store.clear()
        self._resumed = None
        for index, state in saved["blocks"].items():
            if index == saved["active"]:
                self._resumed = (index, state)
            else:
                self.store.put(index, state)
        self.steps = saved["steps"]
        self.changed_at = list(saved["changed_at"])
        self._remainders = [dict(saved["remainders"].get(block.index, {})) for block in self.partition]

    def _check_fits(self, block: Block, state: BlockState, remainders: Remainders) -> None:
        unknown = state.keys() - block.parameters.keys()
        if unknown:
            raise CheckpointError(f"the saved block {block.index} holds '{min(unknown)}', which is not in this block")
        expected = block.parameters.keys() if self.precision.has_master else set()
        if remainders.keys() != expected:
            raise CheckpointError(
                f"the saved block {block.index} has remainders of {len(remainders)} parameters, precision "
                f"'{self.precision.name}' needs {len(expected)}; resume with the precision it was saved with"
            )


def _require_dtype(partition: Partition, precision: Precision) -> None:
    """Weights of 16 bits without a master lose small updates; nobody should train so without having said so."""
    for name, parameter in partition.model.named_parameters():
        if not precision.has_master and parameter.dtype in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"'{name}' is {str(parameter.dtype).removeprefix('torch.')}, and precision '{precision.name}' keeps no "
                "fp32 master of it: give precision=BF16_EXACT, or model.float() first"
            )

"""`BlockOptimizer`: any `torch.optim` class, on one block at a time (paper Algorithm 1, lines 5 to 8).

with optimizer.visit(block):      freeze the others, unfreeze `block`, build its optimizer
    loss.backward()               gradients exist for `block` alone
    optimizer.step()
    optimizer.zero_grad()
                                  retire: state to the store, gradients gone, everything frozen
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from blocktrain.blocks.activation import activate, release
from blocktrain.blocks.block import Block, Partition
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.optim.decay import Undecayed, norms_and_biases, undecayed_ids
from blocktrain.optim.master import Masters, Remainders, lower
from blocktrain.optim.precision import BF16_EXACT, FP32, Precision
from blocktrain.optim.state import BlockState, Drop, StateStore, to_host


@dataclass(eq=False)
class _Active:
    """What exists only while a block is being trained."""

    block: Block
    trained: Mapping[str, nn.Parameter]  # what the optimizer moves: the masters, or the weights themselves
    optimizers: list[torch.optim.Optimizer]
    masters: Masters | None


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
        others: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        **kwargs: Any,
    ):
        self.partition = partition
        self.optimizer_class = optimizer_class
        self.kwargs = kwargs
        self.others = others or (
            torch.optim.AdamW,
            {key: kwargs[key] for key in ("lr", "weight_decay") if key in kwargs},
        )
        self.store: StateStore = state if state is not None else Drop()
        self.precision = precision
        self.frozen_dropout = frozen_dropout
        self.steps = 0
        self.changed_at = [0] * len(partition)  # the step that last moved each block
        self._undecayed = undecayed_ids(partition.model, undecayed)
        self._matrices = _hidden_matrices(partition) if _matrices_only(optimizer_class) else None
        self._remainders: list[Remainders] = [
            lower(block.parameters) if precision == BF16_EXACT else {} for block in partition
        ]
        self._resumed: tuple[int, BlockState] | None = None  # of the block that was active when it was saved
        self._active: _Active | None = None
        self.store.clear()
        release(partition)

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
        masters = Masters(block.parameters, self._remainders[block.index]) if self._remainders[block.index] else None
        trained = masters.parameters if masters else block.parameters
        active = _Active(block, trained, self._build(block, trained), masters)
        state = self._state_to_restore(block)
        if state is not None:
            _restore(active, state)
        self._active = active

    def _retire(self) -> None:
        active = self._require_active()
        self._active = None
        if active.masters is not None:
            self._remainders[active.block.index] = active.masters.close()
        release(self.partition)
        self.store.put(active.block.index, _state_of(active))

    def _state_to_restore(self, block: Block) -> BlockState | None:
        state = self.block_state(block.index)
        if self._resumed is not None and self._resumed[0] == block.index:
            self._resumed = None
        return state

    def _build(
        self, block: Block, trained: Mapping[str, nn.Parameter], *, without: Collection[str] = ()
    ) -> list[torch.optim.Optimizer]:
        """One optimizer over `trained`, or two where the class takes matrices only; `without` some of its options."""
        taken = {n: p for n, p in trained.items() if self._matrices is None or n in self._matrices}
        rest = {n: p for n, p in trained.items() if n not in taken}
        optimizers = []
        for (cls, options), mine in (((self.optimizer_class, self.kwargs), taken), (self.others, rest)):
            if mine:
                kept = {key: value for key, value in options.items() if key not in without}
                optimizers.append(cls(self._groups(block, cls, mine), **kept))
        return optimizers

    def _groups(self, block: Block, cls: type, mine: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
        """Parameters with and without weight decay."""
        if "weight_decay" not in inspect.signature(cls).parameters:
            return [{"params": list(mine.values())}]
        decayed = [p for name, p in mine.items() if id(block.parameters[name]) not in self._undecayed]
        plain = [p for name, p in mine.items() if id(block.parameters[name]) in self._undecayed]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    def _require_active(self) -> _Active:
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

    def step(self) -> None:
        """One optimizer step on the active block."""
        active = self._require_active()
        for optimizer in active.optimizers:
            optimizer.step()
        if active.masters is not None:
            active.masters.write_weights()
        self.steps += 1
        self.changed_at[active.block.index] = self.steps

    def zero_grad(self) -> None:
        """Free the active block's gradients."""
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
        return _bytes(_state_of(self._require_active()))

    def predicted_state_bytes(self, block: Block) -> int:
        """What `state_bytes` will be in a visit to `block`: a step is taken on tensors without memory."""
        trained = {
            name: nn.Parameter(torch.empty_like(p, dtype=self._trained_dtype(p), device="meta"))
            for name, p in block.parameters.items()
        }
        optimizers = self._build(block, trained, without=("fused", "foreach", "capturable"))
        for parameter in trained.values():
            parameter.grad = torch.empty_like(parameter)
        with _AnyNumber():
            for optimizer in optimizers:
                optimizer.step()
        return _bytes(_state_of(_Active(block, trained, optimizers, None)))

    def _trained_dtype(self, weight: nn.Parameter) -> torch.dtype:
        return torch.float32 if self.precision.remainder == "host" else weight.dtype

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
            return to_host(_state_of(self._active))
        if self._resumed is not None and self._resumed[0] == index:
            return self._resumed[1]
        return self.store.get(index)

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
        expected = block.parameters.keys() if self.precision == BF16_EXACT else set()
        if remainders.keys() != expected:
            raise CheckpointError(
                f"the saved block {block.index} has remainders of {len(remainders)} parameters, precision "
                f"'{self.precision.name}' needs {len(expected)}; resume with the precision it was saved with"
            )


class _AnyNumber(TorchDispatchMode):
    """Lets a step without memory read a number out of a tensor (Adafactor its norm, ASGD its rate): any will do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


def _state_of(active: _Active) -> BlockState:
    """The optimizers' state by parameter name; entries that hold nothing are left out."""
    names = {id(parameter): name for name, parameter in active.trained.items()}
    return {
        names[id(parameter)]: {key: value for key, value in entries.items() if value is not None}
        for optimizer in active.optimizers
        for parameter, entries in optimizer.state.items()
        if entries
    }


def _bytes(state: BlockState) -> int:
    return sum(value.nbytes for entries in state.values() for value in entries.values() if torch.is_tensor(value))


def _restore(active: _Active, state: BlockState) -> None:
    """Give each optimizer the state of its parameters, on the device where it expects it."""
    names = {id(parameter): name for name, parameter in active.trained.items()}
    for optimizer in active.optimizers:
        for group in optimizer.param_groups:
            # As in `Optimizer.load_state_dict`: step counts stay on the host unless the update is one device kernel.
            counts_on_device = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                entries = state.get(names[id(parameter)])
                if entries is not None:
                    optimizer.state[parameter] = {
                        key: _place(key, value, parameter, counts_on_device) for key, value in entries.items()
                    }


def _place(key: str, value: Any, parameter: nn.Parameter, counts_on_device: bool) -> Any:
    if not torch.is_tensor(value):
        return value
    on_host = key == "step" and not counts_on_device
    return value.to("cpu" if on_host else parameter.device, copy=True)


def _matrices_only(cls: type[torch.optim.Optimizer]) -> bool:
    """Muon orthogonalises matrices and refuses anything else."""
    return issubclass(cls, torch.optim.Muon)


def _hidden_matrices(partition: Partition) -> set[str]:
    """2-D weights of all layers but the chain's first and last (Jordan et al. 2024: those stay with AdamW)."""
    return {name for owned in partition.chain.owned[1:-1] for name, parameter in owned.items() if parameter.ndim == 2}

"""The tables of a run's configuration that are not defined beside what they configure, one small dataclass each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from blocktrain.chain.checkpointing import Boundaries
from blocktrain.chain.partition_config import PartitionConfig
from blocktrain.contrib.learning_tail import Rule, Tail
from blocktrain.errors import ConfigError, nearest
from blocktrain.modules.int8_linear import FrozenCompute
from blocktrain.modules.kernels import Kernels
from blocktrain.optim.precision import Moments
from blocktrain.optim.state_store import STATE_STORES
from blocktrain.schedule import Schedule, Span, make_schedule
from blocktrain.stopping import Plateau
from blocktrain.units import Duration


@dataclass(frozen=True, kw_only=True)
class BlocksConfig(PartitionConfig):
    """How the model is cut into blocks: by their number, their size, or the names of their layers.

    frozen_dropout: let dropout act in frozen layers too; the prefix cache is then refused.
    """

    frozen_dropout: bool = False


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Which block is visited when, and for how long.

    visit: the longest a visit lasts; an epoch is one pass over the subset.
    first_visits: the lengths of the run's first visits, in place of `visit`: `["2000 steps"]` trains the first block
        longer.
    sweeps: the number of sweeps; if it is left out, `[stop]` ends the run.
    order: of the blocks in a sweep; "shuffled" draws a new order for each sweep; or a list
        of block numbers.
    span: what a visit trains: its "block"; or the "suffix", every block above it too, to learn more from a token; that
        takes the memory of all these blocks.
    kind: "cyclic"; or a schedule of your own, "package.module:Class", which is given visit, sweeps, seed and options.
    options: further arguments of that class.
    """

    visit: Duration
    first_visits: tuple[Duration, ...] = ()
    sweeps: int | None = None
    order: Literal["ascending", "descending", "shuffled"] | tuple[int, ...] = "ascending"
    span: Span = "block"
    plateau: Plateau | None = None
    kind: str = "cyclic"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.build(seed=0)  # its own checks

    def build(self, *, seed: int) -> Schedule:
        """The schedule that this table describes; `seed` decides what it draws."""
        options = self.options
        if self.kind == "cyclic":
            if options:
                raise ConfigError("options are for a schedule of your own; name its class in schedule.kind")
            options = {"first_visits": self.first_visits, "order": self.order, "span": self.span}
        else:
            defaults = {"first_visits": (), "order": "ascending", "span": "block"}
            changed = [key for key, default in defaults.items() if getattr(self, key) != default]
            if changed:
                raise ConfigError(f"kind = '{self.kind}' takes options, not {changed[0]}: set schedule.options")
        return make_schedule(self.kind, visit=self.visit, sweeps=self.sweeps, seed=seed, **options)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer of the active block.

    name: a class of `torch.optim`, or one of your own by its path, "package.module:Class".
    lr: its learning rate, before `[learning_rate]` shapes it.
    options: further arguments of the class.
    decay: what is decayed: "weights" leaves norms and biases out.
    weight_decay: none is the class's own default; norms and biases are left out unless `decay = "all"`.
    state: where a block's moments stay until its next visit: "drop", "host" or "disk".
    moments: "8bit" keeps AdamW's in 8 bits, 2 bytes a parameter instead of 8.
    max_grad_norm: clip the active block's gradients to this total norm; none never clips.
    in_backward: step each weight in the backward pass, as soon as its gradient is whole, so that one gradient is
        there at a time. Needs whole batches, and no clipping.
    tail: how the weights above the active block are updated, without moments and inside the backward pass: "sgd",
        normalised, or "newton-schulz", Muon without momentum. Needs fp32 and whole batches.
    tail_share: the share of `lr` that a tail weight moves by; twice that where it is orthogonalized.
    """

    name: str = "AdamW"
    lr: float = 1e-3
    weight_decay: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    decay: Literal["weights", "all"] = "weights"
    state: str = "drop"
    moments: Moments = "fp32"
    max_grad_norm: float | None = None
    in_backward: bool = False
    tail: Literal["none"] | Rule = "none"
    tail_share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"lr must be positive, not {self.lr:g}")
        if self.state not in STATE_STORES:
            raise ConfigError(f"state '{self.state}' is unknown; {nearest(self.state, STATE_STORES)}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be positive, not {self.max_grad_norm:g}")
        if self.in_backward and self.max_grad_norm is not None:
            raise ConfigError(
                f"in_backward = true steps each weight before the norm of all gradients is known: leave out "
                f"max_grad_norm = {self.max_grad_norm:g}, or in_backward"
            )
        if self.tail != "none":
            Tail(rule=self.tail, share=self.tail_share)  # its own checks
        elif not 0 < self.tail_share < math.inf:
            raise ConfigError(f"tail_share must be positive, not {self.tail_share:g}")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What a step keeps on the device, and what it trades to keep less.

    frozen: where frozen weights are while no layer runs with them; "host" copies them to the device one layer ahead.
    frozen_compute: "int8" computes the matrix products of frozen layers in int8, which is faster and not exact; the
        head's stay exact, as do evaluations and the active block.
    checkpointing: "layers" keeps each layer's input and computes its activations again in the backward pass.
    boundaries: where those inputs are stored: on the "device", or on the "host".
    loss_chunk: tokens whose logits exist at once; None is the model's own loss, which has all of them.
    kernels: "liger" takes Liger's norms and activations (CUDA); "auto" where installed.
    """

    frozen: Literal["device", "host"] = "device"
    frozen_compute: FrozenCompute = "exact"
    checkpointing: Literal["off", "layers"] = "off"
    boundaries: Boundaries = "device"
    loss_chunk: int | None = None
    kernels: Kernels = "torch"

    def __post_init__(self) -> None:
        if self.boundaries == "host" and self.checkpointing == "off":
            raise ConfigError("boundaries = 'host' says where checkpointed inputs wait: set checkpointing = 'layers'")
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ConfigError(f"loss_chunk must be at least 1 token, not {self.loss_chunk}")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """What one optimizer step sees.

    rows: sequences or images.
    micro_rows: how many at a time, gradients accumulating in fp32; it divides `rows`. none: all at once;
        "auto": the most that fit into the memory that is free when the run starts.
    """

    rows: int = 8
    micro_rows: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ConfigError(f"rows must be at least 1, not {self.rows}")
        if isinstance(self.micro_rows, int) and (self.micro_rows < 1 or self.rows % self.micro_rows):
            raise ConfigError(f"micro_rows = {self.micro_rows} must divide rows = {self.rows}")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The validation loss, and what the model answers to validation prompts.

    every: how often, beside the start and the end.
    rows: how many validation rows, the same first ones each time.
    batch_rows: how many at a time; none: as many as a training step takes at a time (`batch.micro_rows`), which needs
        less memory than the step.
    generate: the number of validation conversations whose answers are generated and compared with the reference.
    new_tokens: the most an answer has.
    answer_marker: compare only the word or number behind it ("####" for GSM8K); None: the whole text.
    """

    every: Duration = Duration.steps(100)
    rows: int = 256
    batch_rows: int | None = None
    generate: int = 0
    new_tokens: int = 256
    answer_marker: str | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.new_tokens < 1 or (self.batch_rows is not None and self.batch_rows < 1):
            raise ConfigError(
                "rows, batch_rows and new_tokens must be at least 1, not "
                f"{self.rows}, {self.batch_rows} and {self.new_tokens}"
            )
        if self.generate < 0:
            raise ConfigError(f"generate must not be negative, not {self.generate}")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, written atomically.

    every: how often, beside the end and an interruption.
    keep: how many stay, the newest ones.
    keep_best: beside these, keep the one with the lowest validation loss, for `export --checkpoint best`. Only those
        that were written right after an evaluation have one.
    """

    every: Duration = Duration.steps(500)
    keep: int = 2
    keep_best: bool = True

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigError(f"keep must be at least 1, not {self.keep}")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where the run's figures go beside its own log, each through its own client.

    to: none by default.
    project: under which the trackers list the run.
    """

    to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    project: str = "blocktrain"

    def __post_init__(self) -> None:
        if len(set(self.to)) < len(self.to):
            raise ConfigError(f"to names a tracker twice: {', '.join(self.to)}")

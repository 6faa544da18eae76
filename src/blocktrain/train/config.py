"""A run's configuration: one small dataclass a table of the TOML file, most of them defined beside what they configure.

[model]  [text], [chat], [labelled] or [images]  [sampling]  [blocks]  [prefix]  [schedule]  [stop]
[optimizer]  [learning_rate]  [memory]  [batch]  [evaluation]  [checkpoint]  [distributed]  [tracking]
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from blocktrain.cache.config import PrefixConfig
from blocktrain.chain.checkpointing import Boundaries
from blocktrain.chain.model_loading import ModelConfig
from blocktrain.chain.partition_config import PartitionConfig
from blocktrain.contrib.learning_tail import Rule, Tail
from blocktrain.data.chat import ChatConfig
from blocktrain.data.images import ImageConfig
from blocktrain.data.labelled import LabelledConfig
from blocktrain.data.sampling import Sampling
from blocktrain.data.text import TextConfig
from blocktrain.errors import ConfigError, first_line
from blocktrain.modules.kernels import Kernels
from blocktrain.optim.learning_rate import LearningRate
from blocktrain.optim.precision import Moments, preset
from blocktrain.parallel.config import DistributedConfig
from blocktrain.schedule import Schedule, Span, make_schedule
from blocktrain.stopping import Plateau, RunLimit
from blocktrain.train.schema import from_mapping, override, read_toml, to_mapping
from blocktrain.units import Duration

# What may change while a run goes on: keys and tables.
MOVABLE = ("device", "precision", "memory", "prefix", "distributed", "batch.micro_rows", "checkpoint", "tracking")


@dataclass(frozen=True, kw_only=True)
class BlocksConfig(PartitionConfig):
    """How the model is cut into blocks: by their number, their size, or the names of their layers.

    frozen_dropout: let dropout act in frozen layers too; the prefix cache is then refused.
    """

    frozen_dropout: bool = False


EXTRA_TABLES: dict[str, type] = {}  # TOML tables of techniques that are registered from outside the package, by name
CYCLIC_DEFAULTS: dict[str, Any] = {"first_visits": (), "order": "ascending", "span": "block"}


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Which block is visited when, and for how long.

    visit: the longest a visit lasts; an epoch is one pass over the subset.
    first_visits: the same of the run's first visits, in turn: `["2000 steps"]` trains the first block for long.
    sweeps: how many; left out, the run ends by `[stop]`.
    order: of the blocks in a sweep; "shuffled" anew in each; or a list of block numbers.
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
        cyclic = {"first_visits": self.first_visits, "order": self.order, "span": self.span}
        if self.kind == "cyclic" and self.options:
            raise ConfigError("options are for a schedule of your own; name its class in schedule.kind")
        if self.kind != "cyclic":
            changed = [key for key, default in CYCLIC_DEFAULTS.items() if cyclic[key] != default]
            if changed:
                raise ConfigError(f"kind = '{self.kind}' takes options, not {changed[0]}: set schedule.options")
        options = cyclic if self.kind == "cyclic" else self.options
        return make_schedule(self.kind, visit=self.visit, sweeps=self.sweeps, seed=seed, **options)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer of the active block.

    name: a class of `torch.optim`, or one of your own by its path, "package.module:Class".
    lr: its learning rate, before `[learning_rate]` shapes it.
    options: further arguments of the class.
    decay: what is decayed: "weights" leaves norms and biases out.
    weight_decay: none is the class's own default; norms and biases are left out unless `decay = "all"`.
    state: where a block's moments stay until its next visit.
    moments: "8bit" keeps AdamW's in 8 bits, 2 bytes a parameter instead of 8.
    max_grad_norm: clip the active block's gradients to this total norm; none never clips.
    in_backward: step each weight in the backward pass, as soon as its gradient is whole, so that one gradient is
        there at a time. Needs whole batches, and no clipping.
    tail: how what lies above the active block learns, without moments and inside the backward pass: "sgd", normalised,
        or "newton-schulz", Muon without momentum. Needs fp32 and whole batches.
    tail_share: the share of `lr` that a tail weight moves by; twice that where it is orthogonalized.
    """

    name: str = "AdamW"
    lr: float = 1e-3
    weight_decay: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    decay: Literal["weights", "all"] = "weights"
    state: Literal["drop", "host", "disk"] = "drop"
    moments: Moments = "fp32"
    max_grad_norm: float | None = None
    in_backward: bool = False
    tail: Literal["none"] | Rule = "none"
    tail_share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"lr must be positive, not {self.lr:g}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be positive, not {self.max_grad_norm:g}")
        if self.in_backward and self.max_grad_norm is not None:
            raise ConfigError(
                f"in_backward = true steps each weight before the norm of all gradients is known: leave out "
                f"max_grad_norm = {self.max_grad_norm:g}, or in_backward"
            )
        if self.tail != "none":
            Tail(rule=self.tail, share=self.tail_share)  # its own checks


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What a step keeps on the device, and what it pays to keep less.

    frozen: where frozen weights are while no layer runs with them; "host" copies them to the device one layer ahead.
    checkpointing: "layers" keeps each layer's input and computes its activations again in the backward pass.
    boundaries: where those inputs wait: on the "device", or on the "host".
    loss_chunk: tokens whose logits exist at once; None is the model's own loss, which has all of them.
    kernels: "liger" takes Liger's norms and activations (CUDA); "auto" where installed.
    """

    frozen: Literal["device", "host"] = "device"
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
    batch_rows: how many at a time.
    generate: how many validation conversations are asked anew, their answers compared.
    new_tokens: the most an answer has.
    answer_marker: compare only the word or number behind it ("####" for GSM8K); None: the whole text.
    """

    every: Duration = Duration.steps(100)
    rows: int = 256
    batch_rows: int = 16
    generate: int = 0
    new_tokens: int = 256
    answer_marker: str | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.batch_rows < 1 or self.new_tokens < 1:
            raise ConfigError(
                "rows, batch_rows and new_tokens must be at least 1, not "
                f"{self.rows}, {self.batch_rows} and {self.new_tokens}"
            )
        if self.generate < 0:
            raise ConfigError(f"generate must not be negative, not {self.generate}")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, whole or not at all.

    every: how often, beside the end and an interruption.
    keep: how many stay, the newest ones.
    """

    every: Duration = Duration.steps(500)
    keep: int = 2

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


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run.

    name: in reports, and of the run's folder.
    seed: decides weights, data order, dropout and block order.
    device: "auto" is the first GPU, else the CPU; or a name such as "cuda:1".
    precision: "fp32"; "bf16-exact": bf16 weights whose fp32 masters are kept bit for bit; "int8", "nf4": the same, with
        frozen weights in 8 or 4 bits; "bf16": masters are rebuilt from bf16 at each visit, which loses small updates.
    on_nonfinite: what becomes of a step whose loss or gradients are not finite.
    log_every: steps between two step records of `events.jsonl`.
    imports: modules to import before the tables are read: they register techniques, kinds of data, stores or methods of
        your own. Their code runs.
    """

    name: str = "run"
    seed: int = 0
    device: str = "auto"
    precision: str = "fp32"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    log_every: int = 1
    imports: tuple[str, ...] = ()
    model: ModelConfig
    schedule: ScheduleConfig
    text: TextConfig | None = None
    chat: ChatConfig | None = None
    labelled: LabelledConfig | None = None
    images: ImageConfig | None = None
    sampling: Sampling = field(default_factory=Sampling)
    blocks: BlocksConfig = field(default_factory=BlocksConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    stop: RunLimit = field(default_factory=RunLimit)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learning_rate: LearningRate = field(default_factory=LearningRate)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    tables: dict[str, Any] = field(default_factory=dict)  # of techniques registered from outside, by name

    def __post_init__(self) -> None:
        data = (self.text, self.chat, self.labelled, self.images)
        if sum(table is not None for table in data) != 1:
            raise ConfigError("a run trains on [text], [chat], [labelled] or [images]: give exactly one of these")
        if self.schedule.sweeps is None and self.stop == RunLimit():
            raise ConfigError("the run would never end: set schedule.sweeps, or stop.duration, target_loss or hours")
        if self.images is None and self.sampling.variants is not None:
            raise ConfigError("sampling.variants is for augmented images; leave it out for text")
        if (self.text or self.chat) is None and self.memory.loss_chunk is not None:
            raise ConfigError("memory.loss_chunk is for vocabularies; leave it out for [images] and [labelled]")
        if self.chat is None and self.evaluation.generate:
            raise ConfigError("evaluation.generate asks the model questions of [chat]; leave it out for other data")
        if self.optimizer.tail != "none":
            self._check_moving(f"optimizer.tail = '{self.optimizer.tail}'")
            if self.schedule.span == "suffix":
                raise ConfigError("schedule.span = 'suffix' leaves no tail: set it, or optimizer.tail, not both")
        if self.optimizer.in_backward:
            self._check_moving("optimizer.in_backward = true")
        if self.distributed.layout != "data":
            self._check_layout()
        if self.log_every < 1:
            raise ConfigError(f"log_every must be at least 1, not {self.log_every}")
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, not {self.seed}")
        preset(self.precision)

    @property
    def data(self) -> TextConfig | ChatConfig | LabelledConfig | ImageConfig:
        """The one table of data that there is."""
        (table,) = (each for each in (self.text, self.chat, self.labelled, self.images) if each is not None)
        return table

    def _check_moving(self, setting: str) -> None:
        """Of weights that move in the backward pass: there must be one a step, and nothing to take back afterwards."""
        said = f"{setting} moves weights in each backward pass"
        if self.batch.micro_rows not in (None, self.batch.rows):
            raise ConfigError(f"{said}: leave out batch.micro_rows, and use fewer batch.rows where memory is short")
        if self.on_nonfinite == "skip":
            raise ConfigError(f"{said}, so no step can be skipped afterwards: set on_nonfinite = 'stop'")

    def _check_layout(self) -> None:
        """What layers or weights that are shared out do not go with."""
        layout, is_sharded = self.distributed.layout, self.distributed.layout == "fsdp"
        found = {
            "precision": self.precision
            not in (("fp32", "bf16-exact") if is_sharded else ("fp32", "bf16", "bf16-exact")),
            "model.grown_layers": self.model.grown_layers != "drawn",
            "memory.frozen": self.memory.frozen != "device",
            "schedule.span": self.schedule.span != "block",
            "optimizer.tail": self.optimizer.tail != "none",
            "optimizer.in_backward": self.optimizer.in_backward,
            "optimizer.name": is_sharded and self.optimizer.name in ("Muon", "Adafactor"),
            "optimizer.state": is_sharded and self.optimizer.state == "disk",
            "memory.loss_chunk": is_sharded and self.memory.loss_chunk is not None,
            "optimizer.moments": is_sharded and self.optimizer.moments != "fp32",
            "evaluation.generate": is_sharded and self.evaluation.generate > 0,
            "batch.micro_rows": is_sharded and self.batch.micro_rows == "auto",
            "distributed.reduce_dtype": not is_sharded and self.distributed.reduce_dtype != "fp32",
        }
        for key in (key for key, wrong in found.items() if wrong):
            value = reduce(getattr, key.split("."), self)
            raise ConfigError(
                f"distributed.layout = '{layout}' does not go with {key} = {value!r}; change it, or set layout = 'data'"
            )

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Read a TOML file with `a.b=c` overrides; relative data and model folders are seen from the working folder."""
        return cls.from_mapping(read_toml(path, overrides))

    def moved(self, overrides: Sequence[str]) -> RunConfig:
        """This run on other hardware: with `a.b=c` overrides of where and in what precision it computes, not of what it
        learns from what. Raises `ConfigError` for any other key."""
        for text in overrides:
            key = text.partition("=")[0].strip()
            if key not in MOVABLE and key.partition(".")[0] not in MOVABLE:
                raise ConfigError(
                    f"'{key}' cannot be changed in a run that has begun; what can is {', '.join(MOVABLE)}. "
                    "For anything else train anew, with another --out"
                )
        return self.from_mapping(override(self.to_mapping(), overrides)) if overrides else self

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> RunConfig:
        """From nested dictionaries, as `to_mapping` gives them. Imports the modules that `imports` names first."""
        for module in values.get("imports") or ():
            try:
                importlib.import_module(str(module))
            except ImportError as error:
                raise ConfigError(
                    f"imports: module '{module}' cannot be imported ({first_line(error)}); is it on PYTHONPATH?"
                ) from None
        if "tables" in values:
            raise ConfigError("unknown key 'tables'; write the table itself at the top level")
        extra = {name: table for name, table in EXTRA_TABLES.items() if name in values}
        config = from_mapping(cls, {key: value for key, value in values.items() if key not in extra})
        tables = {name: from_mapping(table, values[name], where=name) for name, table in extra.items()}
        return replace(config, tables=tables) if tables else config

    def to_mapping(self) -> dict[str, Any]:
        """Nested dictionaries of plain values, as stored in `run.json`."""
        mapping = to_mapping(replace(self, tables={}))
        del mapping["tables"]
        return mapping | {name: to_mapping(table) for name, table in self.tables.items()}

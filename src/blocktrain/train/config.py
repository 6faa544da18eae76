"""A run's configuration: one small dataclass a table of the TOML file, most of them defined beside what they configure.

[model]  one table of data: [text], [chat], [labelled] or [images]  [sampling]  [blocks]  [prefix]  [schedule]  [stop]
[optimizer]  [learning_rate]  [memory]  [batch]  [evaluation]  [checkpoint]  [distributed]  [tracking]

Incompatible settings are one table, `CONFLICTS`, at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from blocktrain.cache.config import PrefixConfig
from blocktrain.chain.model_loading import ModelConfig
from blocktrain.data import DATA_KINDS, DataConfig, DataKind, kind_of
from blocktrain.data.sampling import Sampling
from blocktrain.dotted_path import imported_module
from blocktrain.errors import ConfigError
from blocktrain.optim.learning_rate import LearningRate
from blocktrain.optim.precision import preset
from blocktrain.parallel.config import DistributedConfig
from blocktrain.stopping import RunLimit
from blocktrain.train.config_tables import (
    BatchConfig,
    BlocksConfig,
    CheckpointConfig,
    EvaluationConfig,
    MemoryConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrackingConfig,
)
from blocktrain.train.familiar_names import our_names
from blocktrain.train.pretrained_defaults import with_pretrained_defaults
from blocktrain.train.toml_dataclasses import from_mapping, override, read_toml, to_mapping

LONGEST_NAME = 100  # letters of a run's name

# What may change while a run goes on: keys and tables; and where the data are, which are known by their content.
DATA_PLACES = ("source", "validation", "cache")
MOVABLE = ("device", "precision", "memory", "prefix", "distributed", "batch.micro_rows", "checkpoint", "tracking")
EXTRA_TABLES: dict[str, type] = {}  # TOML tables of techniques that are registered from outside the package, by name


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run.

    name: the run's name, in reports and for its folder.
    seed: decides weights, data order, dropout and block order.
    device: "auto" is the first GPU, else the CPU; or a name such as "cuda:1".
    precision: "fp32"; "bf16-exact": bf16 weights whose fp32 masters are kept bit for bit; "int8", "nf4": the same, with
        frozen weights in 8 or 4 bits; "bf16": masters are rebuilt from bf16 at each visit, which loses small updates.
    on_nonfinite: what to do with a step whose loss or gradients are not finite.
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
    data: DataConfig  # the table [text], [chat], [labelled] or [images], or that of another registered kind
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
        if self.schedule.sweeps is None and self.stop == RunLimit():
            raise ConfigError(
                "the run would never end: set schedule.sweeps, or stop.duration, target_loss, patience or hours"
            )
        if not self.name.isprintable() or self.name.strip(". ") == "" or len(self.name) > LONGEST_NAME:
            raise ConfigError(
                f"name must be 1 to {LONGEST_NAME} printable characters, not {self.name[: LONGEST_NAME + 1]!r}"
            )
        if self.log_every < 1:
            raise ConfigError(f"log_every must be at least 1, not {self.log_every}")
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, not {self.seed}")
        object.__setattr__(self, "data", _with_tokenizer(self.data, self.model))
        preset(self.precision)
        for conflict in CONFLICTS:
            if conflict.when(self):
                raise ConfigError(conflict.message(self))

    @property
    def data_kind(self) -> DataKind[Any]:
        """The kind of the run's data."""
        return kind_of(self.data)

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Read a TOML file with `a.b=c` overrides; relative data and model folders are seen from the working folder."""
        return cls.from_mapping(read_toml(path, overrides))

    def resumed_with(self, overrides: Sequence[str]) -> RunConfig:
        """This run on other hardware: with `a.b=c` overrides of where and in what precision it computes, not of what it
        learns from what. Raises `ConfigError` for any other key."""
        for text in overrides:
            key = text.partition("=")[0].strip()
            if not _is_movable(key):
                known = [*MOVABLE, *(f"{self.data_kind.name}.{place}" for place in DATA_PLACES)]
                raise ConfigError(
                    f"'{key}' cannot be changed after a run has started; only these can: {', '.join(known)}. "
                    "For anything else start a new run, with another --out"
                )
        return self.from_mapping(override(self.to_mapping(), overrides)) if overrides else self

    def changes_since(self, saved: Mapping[str, Any]) -> list[str]:
        """Keys that have another value than in `saved` (as `to_mapping` gave it) and must not change on resume."""
        before, now = _flat(self.from_mapping(saved).to_mapping()), _flat(self.to_mapping())
        return [key for key in sorted({*before, *now}) if before.get(key) != now.get(key) and not _is_movable(key)]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RunConfig:
        """Read nested dictionaries, as `to_mapping` gives them. Imports the modules that `imports` names first. Keys
        that are left out get the defaults of `pretrained_defaults` where the run goes on from pretrained weights."""
        names = our_names([key for key in values if key != "learning_rate" or not isinstance(values[key], Mapping)])
        if names:
            raise ConfigError(f"keys of another trainer: {names}; 'blocktrain config' shows every key")
        values = with_pretrained_defaults(values)
        imports = values.get("imports") or ()
        if not isinstance(imports, list | tuple) or not all(isinstance(module, str) for module in imports):
            raise ConfigError(
                f"imports must be a list of modules, such as ['my_package.my_technique'], not {imports!r}"
            )
        for module in imports:
            imported_module(module, "imports")
        given = [name for name in DATA_KINDS if values.get(name, "none") != "none"]
        if len(given) != 1:
            names = ", ".join(f"[{name}]" for name in DATA_KINDS)
            raise ConfigError(f"a run trains on one kind of data: give exactly one of the tables {names}")
        extra = {name: table for name, table in EXTRA_TABLES.items() if name in values}
        own = {key: value for key, value in values.items() if key not in (*DATA_KINDS, *extra)}
        for key in {"data", "tables"} & own.keys():
            raise ConfigError(f"unknown key '{key}'; write the table itself at the top level, such as [{given[0]}]")
        return from_mapping(
            cls,
            own,
            built={
                "data": from_mapping(DATA_KINDS[given[0]].config, values[given[0]], where=given[0]),
                "tables": {name: from_mapping(table, values[name], where=name) for name, table in extra.items()},
            },
            also_known=(*DATA_KINDS, *EXTRA_TABLES),
        )

    def to_mapping(self) -> dict[str, Any]:
        """Nested dictionaries of plain values, as stored in `run.json`."""
        own = to_mapping(self, leave_out=("data", "tables"))
        tables = {self.data_kind.name: self.data, **self.tables}
        return own | {name: to_mapping(table) for name, table in tables.items()}


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Incompatible settings. when: whether a configuration has them. message: the error, with the way out."""

    when: Callable[[RunConfig], bool]
    message: Callable[[RunConfig], str]


def moves_in_backward(config: RunConfig) -> str | None:
    """The setting that makes every backward pass an update, if there is one."""
    if config.optimizer.tail != "none":
        return f"optimizer.tail = '{config.optimizer.tail}' updates weights in each backward pass"
    if config.optimizer.in_backward:
        return "optimizer.in_backward = true updates weights in each backward pass"
    return None


# The values that a layout cannot work with, by key.
_REFUSED_BY_BOTH: Mapping[str, Callable[[Any], bool]] = {
    "model.grown_layers": lambda value: value != "drawn",
    "memory.frozen": lambda value: value != "device",
    "memory.frozen_compute": lambda value: value != "exact",
    "schedule.span": lambda value: value != "block",
    "optimizer.tail": lambda value: value != "none",
    "optimizer.in_backward": bool,
}
PIPELINE_REFUSES: Mapping[str, Callable[[Any], bool]] = {
    "precision": lambda value: value not in ("fp32", "bf16", "bf16-exact"),
    **_REFUSED_BY_BOTH,
    "distributed.reduce_dtype": lambda value: value != "fp32",
}
FSDP_REFUSES: Mapping[str, Callable[[Any], bool]] = {
    "precision": lambda value: value not in ("fp32", "bf16-exact"),
    **_REFUSED_BY_BOTH,
    "optimizer.name": lambda value: value in ("Muon", "Adafactor"),
    "optimizer.state": lambda value: value == "disk",
    "memory.loss_chunk": lambda value: value is not None,
    "optimizer.moments": lambda value: value != "fp32",
    "evaluation.generate": lambda value: value > 0,
    "batch.micro_rows": lambda value: value == "auto",
}


def _refused_by_layout(config: RunConfig) -> str | None:
    """The first key whose value the layout cannot work with."""
    refuses = {"data": {}, "pipeline": PIPELINE_REFUSES, "fsdp": FSDP_REFUSES}[config.distributed.layout]
    return next((key for key, is_refused in refuses.items() if is_refused(_value(config, key))), None)


def _with_tokenizer(data: Any, model: ModelConfig) -> Any:
    """`data` with the default of its tokenizer: a model that comes from a folder or the hub has one of its own."""
    if getattr(data, "tokenizer", "") is not None:  # it is given, or the data are not tokenized
        return data
    return replace(data, tokenizer=model.path or "bytes")


def _value(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _is_movable(key: str) -> bool:
    table, _, name = key.partition(".")
    return key in MOVABLE or table in MOVABLE or (table in DATA_KINDS and name in DATA_PLACES)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


# Incompatible settings, checked in order. `register_technique` adds those of a technique from outside.
CONFLICTS: list[Conflict] = [
    Conflict(
        when=lambda config: config.sampling.variants is not None and not config.data_kind.has_variants,
        message=lambda config: f"sampling.variants is for augmented images; leave it out for [{config.data_kind.name}]",
    ),
    Conflict(
        when=lambda config: config.memory.loss_chunk is not None and not config.data_kind.has_vocabulary,
        message=lambda config: (
            f"memory.loss_chunk needs data whose tokens are predicted; leave it out for [{config.data_kind.name}]"
        ),
    ),
    Conflict(
        when=lambda config: config.evaluation.generate > 0 and not config.data_kind.can_generate,
        message=lambda config: (
            f"evaluation.generate works with [chat] only; leave it out for [{config.data_kind.name}]"
        ),
    ),
    Conflict(
        when=lambda config: (
            moves_in_backward(config) is not None and config.batch.micro_rows not in (None, config.batch.rows)
        ),
        message=lambda config: (
            f"{moves_in_backward(config)}: leave out batch.micro_rows, and use fewer batch.rows where memory is short"
        ),
    ),
    Conflict(
        when=lambda config: moves_in_backward(config) is not None and config.on_nonfinite == "skip",
        message=lambda config: (
            f"{moves_in_backward(config)}, so no step can be skipped afterwards: set on_nonfinite = 'stop'"
        ),
    ),
    Conflict(
        when=lambda config: config.optimizer.tail != "none" and config.schedule.span == "suffix",
        message=lambda config: (
            "schedule.span = 'suffix' already trains every block above: set it, or optimizer.tail, not both"
        ),
    ),
    Conflict(
        when=lambda config: _refused_by_layout(config) is not None,
        message=lambda config: (
            f"distributed.layout = '{config.distributed.layout}' does not go with {_refused_by_layout(config)} = "
            f"{_value(config, _refused_by_layout(config) or '')!r}; change it, or set layout = 'data'"
        ),
    ),
]

"""The techniques that a run may use: those of the package, each in its own file, and those registered from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from blocktrain.data import DATA_KINDS
from blocktrain.records.run_records import Opening
from blocktrain.train.config import CONFLICTS, EXTRA_TABLES, Conflict, RunConfig
from blocktrain.train.context import TrainingContext
from blocktrain.train.technique import Technique, Techniques
from blocktrain.train.techniques import growth, kernels, memory_saving, prefix_caching

# What makes a technique of a run as this process works on it, its opening records and its folder; None where the
# configuration does not ask for it.
Build = Callable[[TrainingContext, Opening, Path], Technique | None]

TECHNIQUES: dict[str, Build] = {  # by name, the outermost first; those from outside the package lie inside of ours
    "kernels": kernels.build,
    "memory_saving": memory_saving.build,
    "growth": growth.build,
    "prefix_cache": prefix_caching.build,
}


def register_technique(
    name: str, build: Build, *, table: type | None = None, conflicts: Sequence[Conflict] = ()
) -> None:
    """Make a technique known to all runs.

    table: a frozen dataclass, for a technique that has a TOML table `[name]` of its own; a run's configuration then has
        it as `config.tables[name]`, where the table is given. The keys of the package's own techniques are in
        `train/config_tables.py`.
    conflicts: settings that it is incompatible with; they are refused when a configuration is read.
    """
    if name in (*TECHNIQUES, *DATA_KINDS, *RunConfig.__dataclass_fields__):
        raise ValueError(f"'{name}' is a technique, a kind of data or a key of the configuration already")
    TECHNIQUES[name] = build
    CONFLICTS.extend(conflicts)
    if table is not None:
        EXTRA_TABLES[name] = table


def build_techniques(context: TrainingContext, opening: Opening, folder: Path) -> Techniques:
    """Those that the run's configuration asks for. `folder` is the run's."""
    built = {name: build(context, opening, folder) for name, build in TECHNIQUES.items()}
    return Techniques({name: technique for name, technique in built.items() if technique is not None})

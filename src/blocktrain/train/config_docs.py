"""The reference of all keys, written from the configuration's dataclasses: their docstrings, types and defaults.

`blocktrain config` prints it, and `docs/configuration.md` is what it prints; a test compares them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from blocktrain.data import DATA_KINDS
from blocktrain.train.config import RunConfig
from blocktrain.train.pretrained_defaults import PRECISION, RATE, SHAPE
from blocktrain.train.toml_dataclasses import LISTS, TABLES
from blocktrain.units import Duration

PRETRAINED = "\n".join(
    f"| `{key}` | `{json.dumps(value)}` | {condition} |"
    for defaults, condition in (
        (RATE, "the optimizer is Adam or AdamW"),
        (SHAPE, "`schedule.sweeps` or `stop.duration` gives the run's length"),
        (PRECISION, "it runs on a GPU and `optimizer.tail` is not set"),
    )
    for key, value in defaults.items()
)
PREAMBLE = f"""# Configuration

A run is one TOML file. Each table below is a dataclass of the package, and this page is written from them:
`blocktrain config` prints it. An unknown key or a wrong value is an error that names the nearest right one; `--set
table.key=value` overrides a key from the command line. A key without a default must be given; "none" is what a key is
when it is left out. A duration is text: `"100 steps"`, `"2M tokens"`, `"1 epoch"`.

The defaults below are those of a run from random weights. A run from the weights at `model.path` has others:

| key | default | if |
|---|---|---|
{PRETRAINED}

A key that is given wins. `train` shows in its first lines what was chosen, and `train --print-config` shows every key.
"""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One line of a table."""

    name: str
    kind: str  # as one would say it: "whole number", "duration", "'a' or 'b'"
    default: str  # as it stands in TOML; "none" for a key to leave out, "" for one that must be given
    text: str  # what it does


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of the file; the keys above all tables have the name ""."""

    name: str
    text: str
    optional: bool  # whether it may be left out where its keys have no defaults
    keys: tuple[Key, ...]


def tables(config: type = RunConfig, name: str = "", *, optional: bool = False) -> Iterator[Table]:
    """The tables of a configuration, each before the tables in it."""
    hints = typing.get_type_hints(config)
    names = {field.name for field in dataclasses.fields(config)}
    texts: dict[str, str] = {}
    for base in reversed(config.__mro__):  # a configuration may extend another one, which documents its own keys
        texts |= _read(inspect.cleandoc(base.__doc__ or ""), names)[1]
    text, _ = _read(inspect.getdoc(config) or "", names)
    keys, inner = [], []
    for field in dataclasses.fields(config):
        if field.name == "data":
            inner += [(kind.config, kind.name, True) for kind in DATA_KINDS.values()]
        if field.name in ("data", "tables"):  # the second: of techniques from outside the package
            continue
        hint = hints[field.name]
        arms = [arm for arm in get_args(hint) or (hint,) if isinstance(arm, type) and arm is not Duration]
        table = next((arm for arm in arms if dataclasses.is_dataclass(arm)), None)
        if table is not None:
            inner.append((table, f"{name}.{field.name}" if name else field.name, type(None) in get_args(hint)))
            continue
        default = ""
        if field.default is not dataclasses.MISSING:
            default = _toml(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = _toml(field.default_factory())
        keys.append(Key(name=field.name, kind=_kind(hint), default=default, text=texts.get(field.name, "")))
    yield Table(name=name, text=text, optional=optional, keys=tuple(keys))
    for table, path, may_be_left_out in inner:
        yield from tables(table, path, optional=may_be_left_out)


def page() -> str:
    """The whole reference as Markdown."""
    lines = [PREAMBLE]
    for table in tables():
        heading = f"## `[{table.name}]`" if table.name else "## Top-level keys"
        text = f"{table.text} (Optional.)" if table.optional else table.text
        lines += [heading, "", text, "", "| key | value | default | |", "|---|---|---|---|"]
        for key in table.keys:
            default = f"`{key.default}`" if key.default not in ("", "none") else key.default
            lines.append(f"| `{key.name}` | {key.kind} | {default} | {key.text} |")
        lines.append("")
    return "\n".join(lines)


def _read(doc: str, names: set[str]) -> tuple[str, dict[str, str]]:
    """A docstring's text, and what it says about `names` in paragraphs that begin with `name:` or `name, name:`."""
    text, texts, current = [], {}, []
    for line in doc.splitlines():
        found = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        if found and names.issuperset(found[1].split(", ")):
            current = found[1].split(", ")
            texts.update(dict.fromkeys(current, found[2]))
        elif current and line.startswith("    "):
            texts.update({name: f"{texts[name]} {line.strip()}" for name in current})
        else:
            current = []
            text.append(line)
    return "\n".join(text).strip(), texts


def _kind(hint: Any) -> str:
    """What a key takes, as one would say it."""
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any value"}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(kind) for kind in arguments if kind is not type(None))
    if origin is Literal:
        return " or ".join(f"`{_toml(choice)}`" for choice in arguments)
    if origin in LISTS:
        return f"list of {_kind(arguments[0])}"
    if origin in TABLES and arguments and arguments[1] is not Any:
        return f"table of {_kind(arguments[1])}"
    if origin in TABLES or hint in TABLES:
        return "table"
    if hint is Duration:
        return "duration"
    return names[hint]


def _toml(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str() | Duration():
            return f'"{value}"'
        case list() | tuple():
            return f"[{', '.join(_toml(item) for item in value)}]"
        case dict():
            entries = ", ".join(f"{key} = {_toml(item)}" for key, item in value.items())
            return f"{{ {entries} }}" if entries else "{}"
        case _:
            return str(value)

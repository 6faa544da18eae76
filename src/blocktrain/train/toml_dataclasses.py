"""Strict mapping from TOML onto dataclasses and back: the dataclasses are the truth, there is no second schema.

An unknown key is an error that names the nearest known one; a value of the wrong type is an error that says where it
stands and what was expected. Every error reads `optimizer.lr: ...`.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from blocktrain.errors import ConfigError, nearest
from blocktrain.parse import parse_toml, shown
from blocktrain.train.familiar_names import our_names
from blocktrain.units import Duration

T = TypeVar("T")

# How the dataclasses annotate a list or a table of the file; a list is read as a tuple.
LISTS = (list, tuple, Sequence)
TABLES = (dict, Mapping)
LARGEST = 2**63 - 1  # whole number


def from_mapping(
    cls: type[T],
    values: Mapping[str, Any],
    *,
    where: str = "",
    built: Mapping[str, Any] | None = None,
    also_known: Collection[str] = (),
) -> T:
    """Build dataclass `cls` from nested mappings.

    where: the dotted key of `values` in the file.
    built: fields that the caller has made from other keys.
    also_known: the names of those keys, for the message about an unknown key.
    """
    _require_table(values, where)
    built = built or {}
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    known = {field.name: hints[field.name] for field in fields if field.name not in built}
    for key in values:
        if key not in known:
            hint = our_names([key]) or nearest(key, [*known, *also_known])
            raise ConfigError(f"unknown key '{_join(where, key)}'; {hint}")
    converted = {key: _convert(known[key], value, _join(where, key)) for key, value in values.items()}
    for field in fields:
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if is_required and field.name not in (*values, *built):
            raise ConfigError(f"key '{_join(where, field.name)}' is missing")
    try:
        return cls(**converted, **built)
    except ConfigError as error:
        raise ConfigError(f"[{where}] {error}" if where else str(error)) from None


def to_mapping(config: Any, *, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The inverse: plain dictionaries, lists, strings and numbers; keys that are None are left out."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: _plain(value) for name, value in values.items() if value is not None and name not in leave_out}


def _plain(value: Any) -> Any:
    if isinstance(value, Duration):
        number = int(value.value) if float(value.value).is_integer() else value.value
        return f"{number} {value.unit}"
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def read_toml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping in a TOML file, with `key.sub=value` overrides applied."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ConfigError(f"configuration '{path}' is not a file: it is a folder, a pipe or a device")
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        raise ConfigError(
            f"configuration '{path}' is not TOML, by its name: write the same tables and keys as TOML; 'blocktrain "
            "init' writes a file to start from, and 'blocktrain config' shows every key"
        )
    try:
        values = parse_toml(path.read_text(encoding="utf-8"), f"configuration '{path}'")
    except FileNotFoundError:
        raise ConfigError(f"configuration '{path}' does not exist") from None
    except OSError as error:
        raise ConfigError(f"configuration '{path}' cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration '{path}' is not UTF-8 (byte {error.start:,}); save it as UTF-8") from None
    return override(values, overrides)


def override(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `a.b=c`; `c` is read as TOML, and as plain text where it is not TOML."""
    for text in overrides:
        key, equals, value = text.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not equals or not all(path):
            raise ConfigError(f"--set '{text}' is not of the form a.b=c")
        table = values
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set '{text}': '{part}' is a value, not a table")
        place = text if len(text) <= 80 else f"{text[:57]}..."
        try:
            table[path[-1]] = parse_toml(f"value = {value.strip()}", place)["value"]
        except ConfigError:
            if value.strip().isdigit():  # a number that is too long is no text
                raise
            table[path[-1]] = value.strip()
    return values


def _convert(kind: Any, value: Any, where: str) -> Any:
    """`value`, which stands at the dotted key `where`, as a `kind`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if origin is Literal:
        if value in arguments and type(value) in {type(choice) for choice in arguments}:
            return value
        hint = nearest(str(value), [str(choice) for choice in arguments])
        raise ConfigError(f"{where}: {shown(value)} is not an allowed value; {hint}")
    if kind is Duration:
        if not isinstance(value, Duration | str):
            raise ConfigError(
                f"{where}: {shown(value)} is not a duration; write for example '100 steps' or '2M tokens'"
            )
        try:
            return Duration.parse(value) if isinstance(value, str) else value
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    if dataclasses.is_dataclass(kind):
        return from_mapping(typing.cast(type, kind), value, where=where)
    if origin in LISTS or kind in LISTS:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, not {shown(value)}")
        kind_of_item = arguments[0] if arguments else Any
        return tuple(_convert(kind_of_item, item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin in TABLES or kind in TABLES:
        _require_table(value, where)
        kind_of_item = arguments[1] if arguments else Any
        return {key: _convert(kind_of_item, item, _join(where, key)) for key, item in value.items()}
    is_of_kind = kind is Any or isinstance(value, int | float if kind is float else kind)
    if is_of_kind and (kind in (bool, Any) or not isinstance(value, bool)):
        _refuse_odd(value, where)
        return float(value) if kind is float else value
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    raise ConfigError(f"{where} must be {names.get(kind, kind)}, not {shown(value)}")


def _refuse_odd(value: Any, where: str) -> None:
    """Raise `ConfigError` for a value that no key can take."""
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{where} is nan; give a number")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ConfigError(f"{where} must be at most {LARGEST:,}, not a number of {len(str(abs(value)))} digits")
    if isinstance(value, str) and any(ord(letter) < ord(" ") and letter not in "\n\r\t" for letter in value):
        raise ConfigError(f"{where} has control characters: {shown(value)}")


def _convert_union(kinds: Sequence[Any], value: Any, where: str) -> Any:
    """The first alternative that takes the value; where none does, the last one's complaint (of those for lists, where
    the value is a list; of the others, where it is not). "none" unsets what may be left out."""
    if value == "none" and type(None) in kinds:
        return None
    choices = [kind for kind in kinds if kind is not type(None)]
    choices.sort(key=lambda kind: (get_origin(kind) in LISTS) == isinstance(value, list))
    for kind in choices[:-1]:
        try:
            return _convert(kind, value, where)
        except ConfigError:
            continue
    return _convert(choices[-1], value, where)


def _require_table(value: Any, where: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is a table: write [{where}], not {shown(value)}")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key

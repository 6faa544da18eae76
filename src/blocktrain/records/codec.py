"""Dataclasses to plain JSON values and back, by their type hints.

The log writes numbers that JSON cannot hold as text (`"nan"`, `"inf"`), which `float` reads back.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from blocktrain.parse import shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")
Event = dict[str, Any]  # one line of the log: plain values


def encode(record: DataclassInstance) -> Event:
    """The fields of a dataclass, nested ones included; one marked `optional` is left out while it has its default."""
    values = {item: getattr(record, item.name) for item in dataclasses.fields(record)}
    return {
        item.name: _plain(value)
        for item, value in values.items()
        if not (item.metadata.get("optional") and value == item.default)
    }


def decode(cls: type[D], values: Mapping[str, Any]) -> D:
    """The dataclass `cls` from what `encode` returned, also in another version of this package.

    Unknown keys are ignored, and a missing key takes the field's default.

    Raises `ValueError` for a missing field without a default, `TypeError` or `ValueError` for a value of another type.
    """
    hints, found = _hints(cls), {}
    for item in dataclasses.fields(cls):
        if item.name in values:
            found[item.name] = _typed(hints[item.name], values[item.name], item.name)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ValueError(f"a '{getattr(cls, 'kind', cls.__name__)}' record without '{item.name}'")
    return cls(**found)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return encode(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


_hints = functools.cache(typing.get_type_hints)


def _typed(hint: Any, value: Any, name: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        kinds = [kind for kind in arguments if kind is not type(None)]
        return _typed(
            next((kind for kind in kinds if isinstance(kind, type) and isinstance(value, kind)), kinds[0]), value, name
        )
    if origin is tuple:
        _require(isinstance(value, list | tuple), name, value, "a list")
        return tuple(_typed(arguments[0], item, name) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        _require(isinstance(value, Mapping), name, value, "an object")
        return {arguments[0](key): _typed(arguments[1], item, name) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        _require(isinstance(value, Mapping), name, value, "an object")
        return decode(typing.cast(type, hint), value)
    if hint in (int, float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_allowed = value in ("nan", "inf", "-inf") if isinstance(value, str) else is_number  # JSON has no nan
        is_allowed = is_allowed and (hint is float or math.isfinite(float(value)))
        _require(is_allowed, name, value, "a number" if hint is float else "a finite number")
    elif hint in (str, bool):
        _require(isinstance(value, hint), name, value, "text" if hint is str else "true or false")
    return value if hint is Any else hint(value)


def _require(is_right: bool, name: str, value: Any, expected: str) -> None:
    if not is_right:
        raise ValueError(f"'{name}' must be {expected}, not {shown(value)}")

"""Reading JSON, TOML and numbers that others wrote, and showing them: what is wrong becomes one message."""

from __future__ import annotations

import json
import math
import os
import tomllib
import unicodedata
from collections.abc import Callable
from datetime import date, time
from pathlib import Path
from typing import Any, TypeVar

from blocktrain.errors import BlocktrainError, ConfigError, DataError

MOST_DIGITS = 300  # of a whole number; up to here `float` takes it
LONGEST_NAME = 240  # bytes; Linux takes 255, of which temporary names need some

NumberT = TypeVar("NumberT", int, float)


def parse_json(text: str | bytes, place: str, error: type[BlocktrainError] = DataError) -> Any:
    """The value of a JSON text; raises `error`, whose message begins with `place`, where it is none.

    >>> parse_json("[1, 2", "line 3")
    Traceback (most recent call last):
    ...
    blocktrain.errors.DataError: line 3 is not JSON: Expecting ',' delimiter (column 6)
    """
    try:
        return json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise error(f"{place} is not JSON that can be read: it is nested too deeply") from None
    except json.JSONDecodeError as cause:
        line = f"line {cause.lineno}, " if "\n" in cause.doc else ""
        raise error(f"{place} is not JSON: {cause.msg} ({line}column {cause.colno})") from None
    except UnicodeDecodeError as cause:
        raise error(f"{place} is not JSON: it is not UTF-8 (byte {cause.start:,})") from None
    except ValueError as cause:  # a number of thousands of digits
        raise error(f"{place} is not JSON: {cause}") from None


def parse_toml(text: str, place: str) -> dict[str, Any]:
    """The table of a TOML text; raises `ConfigError`, whose message begins with `place`, where it is none."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{place} is not TOML that can be read: it is nested too deeply") from None
    except tomllib.TOMLDecodeError as cause:
        raise ConfigError(f"{place} is not TOML: {cause}") from None
    except ValueError:  # of Python's limit for whole numbers
        raise ConfigError(f"{place} is not TOML that can be read: it has a number of thousands of digits") from None


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


def printable(text: str) -> str:
    """`text` on one line that every terminal shows as it is: other characters become escapes.

    >>> print(printable("two\\nlines, \\x1b[31mred"))
    two\\nlines, \\x1b[31mred
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def shown(value: object) -> str:
    """A value of a JSON or TOML file in a message, cut where it is long.

    >>> print(shown("x"), shown(True), shown(date(1979, 5, 27)), shown({}), shown([0] * 1000))
    'x' true a date a table [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,...
    """
    match value:
        case bool():
            return str(value).lower()
        case None:
            return "null"
        case date() | time():
            return "a date" if isinstance(value, date) else "a time"
        case dict():
            return "a table"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:57]}..."


def json_kind(value: object) -> str:
    """What a JSON value is, in JSON's own words.

    >>> [json_kind(value) for value in (None, {}, [], "x", True, 1, 0.5)]
    ['null', 'an object', 'a list', 'text', 'true', 'a number', 'a number']
    """
    match value:
        case None:
            return "null"
        case dict():
            return "an object"
        case list():
            return "a list"
        case str():
            return "text"
        case bool():
            return str(value).lower()
        case _:
            return "a number"


def output_path(text: str) -> Path:
    """A type for options of `argparse` that name a file or folder to write; `~` is the home folder, as in a shell.

    Raises `ConfigError` for names that cannot be written, or that a terminal would not show as they are.
    """
    if not text:
        raise ConfigError("the name of a file or folder to write is empty; give one")
    if any(unicodedata.category(letter) == "Cc" for letter in text):
        raise ConfigError(f"{text!r} cannot name a file or folder: it has control characters; give another name")
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in Path(text).parts):
        raise ConfigError(f"'{text[:40]}...' cannot name a file or folder: it is longer than {LONGEST_NAME} bytes")
    return Path(text).expanduser()


def number_between(
    name: str, kind: type[NumberT], low: NumberT, high: NumberT, words: str = ""
) -> Callable[[str], NumberT]:
    """A type for the option `name` of `argparse`: a number of `kind` from `low` to `high`; else a `ConfigError`.

    words: those that the option takes as well, for the message.
    """
    what = "a whole number" if kind is int else "a number"

    def parse(text: str) -> NumberT:
        try:
            value = kind(text)
        except ValueError:
            value = kind(low - 1)
        if not math.isfinite(value) or not low <= value <= high:
            raise ConfigError(f"{name} must be {words}{what} from {low:,} to {high:,}, not '{text[:40]}'")
        return value

    return parse

"""Finding what a configuration names by a dotted path, `"package.module:Name"`: a user's own schedule or optimizer."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

from blocktrain.errors import ConfigError, first_line, nearest


def find_by_path(path: str, *, key: str, known: Collection[str]) -> Any:
    """What `path` names; raises `ConfigError` that quotes `key`, the configuration's key, where there is no such thing.

    known: the names that need no path, for the message.

    >>> find_by_path("json.decoder:JSONDecoder", key="schedule.kind", known=["cyclic"]).__name__
    'JSONDecoder'
    """
    module, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(
            f"{key} = '{path}' is unknown; {nearest(path, known)}. A class of your own is 'package.module:Class'"
        )
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(
            f"{key} = '{path}': module '{module}' cannot be imported ({first_line(error)}); is it on PYTHONPATH?"
        ) from None
    except AttributeError:
        raise ConfigError(f"{key} = '{path}': module '{module}' has no '{name}'") from None

"""Finding what a configuration names by a dotted path, `"package.module:Name"`: a user's own schedule or optimizer."""

from __future__ import annotations

import importlib
from typing import Any

from blocktrain.errors import ConfigError, first_line


def find_by_path(path: str, *, key: str) -> Any:
    """What `path` names, as `"package.module:Name"` or `"package.module.Name"`. Importing the module runs its code.

    key: the configuration's key, for the messages. Raises `ConfigError` where there is no such thing.

    >>> find_by_path("json.decoder:JSONDecoder", key="schedule.kind").__name__
    'JSONDecoder'
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(
            f"{key} = '{path}': module '{module}' cannot be imported ({first_line(error)}); install its package, or "
            "add its folder to PYTHONPATH"
        ) from error
    except AttributeError:
        raise ConfigError(f"{key} = '{path}': module '{module}' has no '{name}'") from None

"""Finding what a configuration names by a dotted path, `"package.module:Name"`: a user's own schedule or optimizer."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from blocktrain.errors import ConfigError, first_line


def find_by_path(path: str, *, key: str) -> Any:
    """What `path` names, as `"package.module:Name"` or `"package.module.Name"`. Importing the module runs its code.

    key: the configuration's key, for the messages. Raises `ConfigError` where there is no such thing.

    >>> find_by_path("json.decoder:JSONDecoder", key="schedule.kind").__name__
    'JSONDecoder'
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    found = imported_module(module, f"{key} = '{path}'")
    if not hasattr(found, name):
        raise ConfigError(f"{key} = '{path}': module '{module}' has no '{name}'")
    return getattr(found, name)


def imported_module(name: str, place: str) -> ModuleType:
    """The module called `name`; raises `ConfigError`, whose message begins with `place`, where there is none."""
    if not all(part.replace("-", "_").isidentifier() for part in name.split(".")):
        raise ConfigError(f"{place}: {name!r} is not the name of a module, such as 'my_package.my_module'")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{place}: module '{name}' cannot be imported ({first_line(error)}); install its package, or add its "
            "folder to PYTHONPATH"
        ) from error

"""The standard-library corpus: real text that every machine with Python has, so that a first run needs no download.

The documents are the source files of the running interpreter's public standard-library modules, sorted by name. These
are left out: modules whose name begins with `_`; tests; modules that CPython 3.12 or 3.13 removed; packages that Linux
distributions ship separately (tkinter, idlelib, venv, ensurepip); and tables or jokes (encodings, pydoc_data, this). So
CPython 3.11 to 3.13 have nearly the same modules, though not the same text. CPython 3.11.7 has 345 files with 6,893,377
bytes, of which 23 files with 451,718 bytes are for validation.

The hash of a module's name decides whether a file is for validation (about one in twenty): the two sets are equal on
every machine, and a module that is new in another version does not move any other.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from blocktrain.data.document import Split, hash_fraction
from blocktrain.data.files import Files, SourceFile
from blocktrain.errors import DataError

VALIDATION_SHARE = 0.05

_REMOVED = frozenset(
    {"aifc", "asynchat", "asyncore", "cgi", "cgitb", "chunk", "crypt", "distutils", "imghdr", "imp", "lib2to3"}
    | {"mailcap", "msilib", "nntplib", "pipes", "smtpd", "sndhdr", "sunau", "telnetlib", "uu", "xdrlib"}
)
_SHIPPED_SEPARATELY = frozenset({"ensurepip", "idlelib", "test", "tkinter", "turtle", "turtledemo", "venv"})
_NOT_CODE = frozenset({"antigravity", "encodings", "pydoc_data", "this"})


def stdlib_name() -> str:
    """Identifies this standard library, for the key of its cache."""
    return f"stdlib-{sysconfig.get_path('stdlib')}"


def stdlib_files() -> Files:
    """The files of the corpus by split; raises `DataError` where Python came without the source of its library."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[Split, list[SourceFile]] = {"train": [], "validation": []}
    for module in sorted(sys.stdlib_module_names - _REMOVED - _SHIPPED_SEPARATELY - _NOT_CODE):
        if module.startswith("_"):
            continue
        single = root / f"{module}.py"
        for path in [*([single] if single.is_file() else []), *sorted((root / module).rglob("*.py"))]:
            if {"test", "tests"} & set(path.relative_to(root).parts):
                continue
            name = path.relative_to(root).as_posix()
            # A module that became a package (`json.py`, `json/__init__.py`) stays in its split.
            dotted = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            split: Split = "validation" if hash_fraction(dotted) < VALIDATION_SHARE else "train"
            found[split].append(SourceFile(id=name, path=path))
    if not (found["train"] and found["validation"]):
        raise DataError(f"the standard library at '{root}' has no source files; give a file or a folder as the source")
    return {split: tuple(files) for split, files in found.items()}

"""The standard-library corpus: real text that every machine with Python has, so that a first run needs no download.

Documents are the source files of the running interpreter's public standard-library modules, sorted by name. Left
out are: modules whose name begins with `_`; tests; what CPython 3.12 or 3.13 removed; what Linux distributions ship
apart (tkinter, idlelib, venv, ensurepip); and what is tables or jokes rather than code (encodings, pydoc_data, this).
So CPython 3.11 to 3.13 have nearly the same modules, though not the same text. On CPython 3.11.7: 345 files,
6,893,377 bytes, of which 23 files and 451,718 bytes are validation.

A file is validation when the hash of its module's name says so (about one in twenty): the two sets are the same on
every machine, and a module that is new in another version moves no other.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from blocktrain.data.document import Split, fraction
from blocktrain.data.files import Files, SourceFile
from blocktrain.errors import DataError

VALIDATION_SHARE = 0.05

_REMOVED = frozenset(
    {"aifc", "asynchat", "asyncore", "cgi", "cgitb", "chunk", "crypt", "distutils", "imghdr", "imp", "lib2to3"}
    | {"mailcap", "msilib", "nntplib", "pipes", "smtpd", "sndhdr", "sunau", "telnetlib", "uu", "xdrlib"}
)
_APART = frozenset({"ensurepip", "idlelib", "test", "tkinter", "turtle", "turtledemo", "venv"})
_TABLES = frozenset({"antigravity", "encodings", "pydoc_data", "this"})


def stdlib_name() -> str:
    """Which standard library this is, for the name of its cache."""
    return f"stdlib-{sysconfig.get_path('stdlib')}"


def stdlib_files() -> Files:
    """The corpus's files by split; raises `DataError` where Python came without the source of its library."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[Split, list[SourceFile]] = {"train": [], "validation": []}
    for module in sorted(sys.stdlib_module_names - _REMOVED - _APART - _TABLES):
        if not module.startswith("_"):
            for path in _sources(root, module):
                name = path.relative_to(root).as_posix()
                split: Split = "validation" if fraction(_module_name(name)) < VALIDATION_SHARE else "train"
                found[split].append(SourceFile(id=name, path=path))
    if not (found["train"] and found["validation"]):
        raise DataError(f"the standard library at '{root}' has no source files; give a file or a folder as the source")
    return {split: tuple(files) for split, files in found.items()}


def _sources(root: Path, module: str) -> Iterator[Path]:
    if (root / f"{module}.py").is_file():
        yield root / f"{module}.py"
    for path in sorted((root / module).rglob("*.py")):
        if not {"test", "tests"} & set(path.relative_to(root).parts):
            yield path


def _module_name(path: str) -> str:
    """`json/__init__.py` and `json.py` are the same module: a file that became a package stays in its split."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

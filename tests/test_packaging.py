"""What is beside the Python files of the package is listed in pyproject.toml, so that a wheel has it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "blocktrain"


def test_package_data_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["blocktrain"]
    listed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == listed
    assert len(files) >= 4  # py.typed, the planner's hardware, the report's style and script


def test_every_folder_is_a_package() -> None:
    """setuptools leaves out a folder without an `__init__.py`, and nobody notices in a checkout."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)

"""Ruff sees every file: its own list of excluded names would hide any folder of ours called `build` or `dist`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["src", "tests", "experiments", "benchmarks"]


def seen(folder: Path) -> set[Path]:
    """The Python files that `ruff check` looks at."""
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "--no-cache", "."]
    found = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    return {Path(line) for line in found.splitlines() if line.endswith(".py")}


def test_ruff_checks_every_python_file() -> None:
    ours = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert len(ours) > 200
    assert sorted(ours - seen(ROOT)) == []


def test_a_folder_of_any_name_inside_of_the_package_is_seen(tmp_path: Path) -> None:
    """Such a folder was there once, and was not linted."""
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    paths = {tmp_path / "src" / "blocktrain" / name / "file.py" for name in ("dist", "build", "site", "site-packages")}
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text("")
    assert paths <= seen(tmp_path)

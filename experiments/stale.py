"""Name the results that are older than the code they measure, or that name no commit.

    python experiments/stale.py        1 if there are any

The code of a result is what its scripts import: other scripts of experiments/ and benchmarks/, with what these import,
and the modules of the package that they name. A module that only the package itself imports does not count: after most
commits every result would be stale.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("experiments", "benchmarks")


def stale(root: Path) -> Iterator[str]:
    """A line for each such result of the checkout `root`."""
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.json")):
        name, commits = path.relative_to(root), sorted(set(commits_in(json.loads(path.read_text()))))
        if not commits:
            yield f"{name}: names no commit"
        for commit in commits:
            if not re.fullmatch("[0-9a-f]{40}", commit):
                yield f"{name}: was not written from a commit ({commit})"
                continue
            code = [str(file.relative_to(root)) for file in sorted(code_of(path, root))]
            log = subprocess.run(
                ["git", "-C", str(root), "log", "--format=%h", "--name-only", f"{commit}..HEAD", "--", *code],
                capture_output=True,
                text=True,
                check=False,
            )
            if log.returncode:
                yield f"{name}: its commit {commit[:7]} is not known here"
            elif changed := sorted({line for line in log.stdout.splitlines() if line in code}):
                yield f"{name}: older than {', '.join(changed)} (it is of {commit[:7]})"


def commits_in(result: Any) -> Iterator[str]:
    """The values of all keys "commit"."""
    if isinstance(result, dict):
        if "commit" in result:
            yield str(result["commit"])
        for value in result.values():
            yield from commits_in(value)
    elif isinstance(result, list):
        for value in result:
            yield from commits_in(value)


def code_of(result: Path, root: Path) -> set[Path]:
    """The scripts that name the result file, or else all beside it, those beside it that import one of them, and what
    they import."""
    scripts = set(result.parent.glob("*.py"))
    named = {path for path in scripts if f'"{result.name}"' in path.read_text()} or scripts
    waiting = [path for path in scripts if path in named or not named.isdisjoint(imported(path, root))]
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [] if path.is_relative_to(root / "src") else imported(path, root)
    return found


def imported(script: Path, root: Path) -> Iterator[Path]:
    """The files of this repository that a script imports."""
    places = (root / "src", root / "experiments", script.parent)
    for node in ast.walk(ast.parse(script.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for module in modules:
            stem = module.replace(".", "/")
            candidates = (place / f"{stem}{end}" for place in places for end in (".py", "/__init__.py"))
            yield from (path for path in candidates if path.is_file())


if __name__ == "__main__":
    lines = list(stale(ROOT))
    print(*lines, sep="\n")
    sys.exit(bool(lines))

"""Results that are older than the code they measure are named."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from stale import stale


def test_a_result_is_stale_when_what_its_script_imports_has_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(**files: str) -> str:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        git("add", ".")
        git("commit", "--allow-empty", "-m", "next")
        return git("rev-parse", "HEAD")

    def result(name: str, *commits: str | None) -> None:
        path = tmp_path / name
        path.write_text(json.dumps([{"environment": {"commit": each}} for each in commits]))

    git("init")
    script = "from shared import timed\nfrom package.fast import step\nPLACE = 'x' / \"one.json\"\n"
    first = commit(
        **{
            "benchmarks/speed/one.py": script,
            "benchmarks/speed/two.py": 'import json\nPLACE = "two.json"\n',
            "experiments/shared.py": "import package.slow\n",
            "src/package/__init__.py": "",
            "src/package/fast.py": "import package.deep\n",
            "src/package/slow.py": "",
            "src/package/deep.py": "",
        }
    )
    for name in ("one", "two"):
        result(f"benchmarks/speed/{name}.json", first)
    commit(**{"src/package/deep.py": "1"})
    assert not list(stale(tmp_path))
    second = commit(**{"src/package/slow.py": "1"})
    older = f"benchmarks/speed/one.json: older than src/package/slow.py (it is of {first[:7]})"
    assert list(stale(tmp_path)) == [older]
    result("benchmarks/speed/one.json", second, first)  # a record of each
    assert list(stale(tmp_path)) == [older]
    result("benchmarks/speed/one.json", second)
    result("benchmarks/speed/two.json", None, f"{first}+", "0" * 40)
    assert [line.partition(": ")[2] for line in stale(tmp_path)] == [
        "its commit 0000000 is not known here",
        f"was not written from a commit ({first}+)",
        "was not written from a commit (None)",
    ]
    commit(**{"benchmarks/speed/main.py": "import two\n"})
    result("benchmarks/speed/two.json", second)
    assert list(stale(tmp_path)) == [
        f"benchmarks/speed/two.json: older than benchmarks/speed/main.py (it is of {second[:7]})"
    ]
    result("benchmarks/speed/two.json")
    assert list(stale(tmp_path)) == ["benchmarks/speed/two.json: names no commit"]

"""Records runs again: `python tests/golden/record.py [NAME...]`, all of them where none is named.

WARNING: a recording is what the package did before a change. Record again only where a change of behaviour is intended
and named in CHANGELOG.md, and then the runs that it concerns alone: `git diff` must show nothing that it does not
explain. A refactoring never needs it. It is done on one machine for all runs, so that one machine can compare bits.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from drive import carry_out
from recording import path_of, written
from runs import RUNS


def main(names: list[str]) -> int:
    """Carry `names` out, and keep what came of it."""
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        print(f"no such runs: {', '.join(unknown)}; there are {', '.join(RUNS)}")
        return 2
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        found = carry_out(Path(folder) / "runs", names or list(RUNS))
    failed = {name: recording["failed"] for name, recording in found.items() if "failed" in recording}
    for name, recording in found.items():
        if name in failed:
            print(f"{name} failed:\n{failed[name]}")
            continue
        path_of(name).write_text(written(recording), encoding="utf-8")
        print(f"recorded {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

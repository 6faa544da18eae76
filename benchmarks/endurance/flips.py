"""Does a flipped bit ever change a model without a word? One bit of one file of a run at a time, then a command on it.

    python benchmarks/endurance/flips.py [--flips 500] [--out FILE]

Files are taken in turn, of a finished run (`report`, `export`, `resume`) and of one that stopped half-way (`resume`).

refused        exit code 1 or 2, and one message
identical      the same weights (`export`, `resume`), or the same page (`report`)
page differs   `report` succeeded with another page: a log has no checksum, and shows what it holds
WRONG WEIGHTS, TRACEBACK    must not happen
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CONFIG = """
name = "flips"
device = "cpu"
[text]
source = "text.txt"
row_tokens = 16
cache = "cache"
validation_share = 0.2
[model]
architecture = "gpt2"
config = { n_layer = 2, n_embd = 16, n_head = 2, n_positions = 16 }
[blocks]
count = 2
[schedule]
visit = "4 steps"
sweeps = 1
[optimizer]
state = "host"
[batch]
rows = 4
[prefix]
store = "off"
[evaluation]
every = "4 steps"
rows = 8
[checkpoint]
every = "3 steps"
"""


def command(*words: str) -> tuple[int, str]:
    """Exit code and standard error of `blocktrain WORDS`; 70 for a traceback."""
    from blocktrain.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(words)
        except Exception as error:
            return 70, repr(error)
    return code, said.getvalue()


def weights(run: Path) -> dict[str, str]:
    """SHA-256 of the newest checkpoint's files of weights, as they are on the disk."""
    from blocktrain.train.checkpoint import checkpoints

    newest = checkpoints(run / "checkpoints")[-1]
    return {path.name: _digest(path) for path in sorted(newest.glob("weights-*"))}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def outcome(words: tuple[str, ...], run: Path, expected: Any, measured: Path | None) -> tuple[str, str]:
    """What the command made of the run, and its message."""
    code, said = command(*words)
    if code == 70:
        return "TRACEBACK", said
    if code:
        return "refused", said
    found = weights(run) if measured is None else _digest(measured)
    if found == expected:
        return "identical", said
    return ("page differs" if words[0] == "report" else "WRONG WEIGHTS"), said


def measure(flips: int, chance: random.Random) -> dict[str, Any]:
    """Flip and count. Works in the current folder."""
    import blocktrain as bt
    from blocktrain.records.run_records import Step

    Path("text.txt").write_text(Path(json.decoder.__file__).read_text())
    Path("run.toml").write_text(CONFIG)

    class Crash(BaseException):
        pass

    def crash(record: object) -> None:
        if isinstance(record, Step) and record.step == 7:
            raise Crash

    bt.run(bt.RunConfig.load("run.toml"), "finished")
    with contextlib.suppress(Crash):
        bt.run(bt.RunConfig.load("run.toml"), "stopped", listeners=[crash])
    command("report", "finished", "--out", "page.html")
    command("export", "finished", "exported")
    final = weights(Path("finished"))
    expected = {"report": _digest(Path("page.html")), "export": _digest(Path("exported/model.safetensors"))}
    files = [path for folder in ("finished", "stopped") for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    files = [path for path in files if path.stat().st_size]
    counts: dict[str, Counter[str]] = {}
    bad = []
    for number in range(flips):
        path = files[number % len(files)]
        kind = "resume" if path.parts[0] == "stopped" else ("report", "export", "resume")[number // len(files) % 3]
        shutil.rmtree("run", ignore_errors=True)
        shutil.rmtree("out", ignore_errors=True)
        shutil.copytree(path.parts[0], "run")
        data, at, bit = bytearray(path.read_bytes()), chance.randrange(path.stat().st_size), chance.randrange(8)
        data[at] ^= 1 << bit
        Path("run", *path.parts[1:]).write_bytes(data)
        words = {"report": ("report", "run", "--out", "out/p.html"), "export": ("export", "run", "out")}.get(
            kind, ("resume", "run")
        )
        measured = {"report": Path("out/p.html"), "export": Path("out/model.safetensors")}.get(kind)
        result, said = outcome(words, Path("run"), expected.get(kind, final), measured)
        counts.setdefault(f"{kind}, {path.parts[0]}, {path.name}", Counter())[result] += 1
        if result.isupper():
            bad.append({"file": str(path), "byte": at, "bit": bit, "command": kind, "result": result, "said": said})
    return {"flips": flips, "results": {key: dict(value) for key, value in sorted(counts.items())}, "bad": bad}


def main() -> None:
    """Measure, print a table and write the result."""
    from blocktrain.runtime import environment, pick_device, result_path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=result_path, default=str(HERE / "flips.json"))
    options = parser.parse_args()

    out = options.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = measure(options.flips, random.Random(options.seed))
        os.chdir("/")
    total = Counter[str]()
    for counts in found["results"].values():
        total.update(counts)
    print(dict(total))
    sys.stdout.writelines(f"{item}\n" for item in found["bad"])
    result = {"question": "does a flipped bit change a model silently?", "total": dict(total), **found}
    result |= {"seed": options.seed, "date": datetime.now(UTC).date().isoformat()}
    out.write_text(json.dumps({**result, "environment": environment(pick_device("cpu"))}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Runs commands on inputs that may be wrong, and judges what becomes of each: `python tests/fuzz/fuzz.py --cases 3000`.

clear       exit code 1 or 2 and one message
unclear     a message that shows another library's internals, or says nothing
traceback   an exception that nobody turned into a message
wrong       an input that had to be refused was accepted
left        an input was refused, and a run, an exported model or a file under a temporary name was left behind
hang        no end within the time limit
accepted    exit code 0, which is right for an input that is merely odd
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases import TINY, Case, Refuse, cases, train

SECONDS = 30
MEMORY_BYTES = 12 * 2**30  # of address space: an input must not take the machine down
LEFT = re.compile(r"^run\.json$|^model\.safetensors$|^page\.html$|^plan\.html$|\.part(ial)?$")
UNCLEAR = re.compile(
    r"Traceback|<class|<function|object at 0x|NoneType|unhashable|has no attribute|\w(Error|Exception)\b|Errno"
)


class Hang(BaseException):
    """The time limit has passed."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises `Hang` in what runs inside for too long."""

    def stop(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judge(case: Case) -> tuple[str, str]:
    """The verdict on a case (see the module), and the message or traceback."""
    from blocktrain.cli.main import main

    out, err, here = io.StringIO(), io.StringIO(), Path.cwd()
    outer = Path(tempfile.mkdtemp(prefix="fuzz-"))
    folder = outer / "case"  # a case that reads ".." finds this alone
    folder.mkdir()
    os.environ["XDG_CONFIG_HOME"] = str(folder)
    before: set[Path] = set()
    try:
        os.chdir(folder)
        arguments = case.prepare(folder)
        before = set(folder.rglob("*"))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limited(SECONDS):
            code = main(arguments)
    except SystemExit as stop:  # argparse
        code = stop.code if isinstance(stop.code, int) else 2
    except Hang:
        return "hang", "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
    except BaseException:
        return "traceback", traceback.format_exc()
    finally:
        os.chdir(here)
        new = sorted(path.name for path in {*folder.rglob("*")} - before if LEFT.search(path.name))
        shutil.rmtree(outer, ignore_errors=True)
    if code == 2 and new and "The folder itself is complete" not in err.getvalue():  # of a failed --push
        return "left", f"{new}\n{err.getvalue()}"
    if code == 0:
        return ("wrong" if case.refuse is Refuse.MUST else "accepted"), ""
    message = err.getvalue()
    errors = [line for line in message.splitlines() if "error:" in line]
    if len(errors) != 1 or UNCLEAR.search(errors[0]) or len(errors[0]) < 40:
        return "unclear", message
    return "clear", errors[0]


def prepared(folder: Path) -> tuple[Path, Path]:
    """A finished tiny run, and a tiny model that `from_pretrained` loads."""
    import torch
    import transformers as hf

    from blocktrain.cli.main import main

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 64, "vocab_size": 257}
    hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder / "model")
    work = folder / "work"
    work.mkdir()
    here = Path.cwd()
    try:
        os.chdir(work)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert main(train(work)) == 0
    finally:
        os.chdir(here)
    return work / "run", folder / "model"


def fuzz(seed: int, count: int, *, verbose: bool = False) -> dict[str, list[tuple[str, str]]]:
    """The names and messages of `count` cases by verdict."""
    found: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        finished, saved = prepared(Path(name))
        for number, case in enumerate(cases(seed, finished=finished, saved=saved)):
            if number == count:
                break
            verdict, message = judge(case)
            found[verdict].append((case.name, message))
            if verbose and verdict not in ("clear", "accepted"):
                print(f"-- {number} {verdict}: {case.name}\n{message[-1500:]}", flush=True)
    return dict(found)


def main() -> None:
    """Prints a table of the verdicts, and the messages to be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--messages", type=Path, help="write all clear messages to this file")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    start = time.perf_counter()
    found = fuzz(options.seed, options.cases, verbose=True)
    if options.messages:
        lines = "\n".join(f"{name}\t{message}" for name, message in found.get("clear", []))
        options.messages.write_bytes(lines.encode(errors="backslashreplace"))
    for verdict in ("clear", "accepted", "unclear", "traceback", "wrong", "left", "hang"):
        print(f"{verdict:10} {len(found.get(verdict, []))}")
    print(
        f"{options.cases} inputs, seed {options.seed}, {time.perf_counter() - start:.0f} s, {len(TINY)} keys of the run"
    )
    sys.exit(any(found.get(verdict) for verdict in ("unclear", "traceback", "wrong", "left", "hang")))


if __name__ == "__main__":
    main()

"""A minute of `fuzz.py`: no input ends in a traceback, hangs, or is accepted though it must be refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_inputs_that_may_be_wrong_are_refused_with_one_message(tmp_path: Path) -> None:
    """In a process of its own, which limits its memory."""
    script = Path(__file__).with_name("fuzz.py")
    done = subprocess.run(
        [sys.executable, str(script), "--cases", "200", "--seed", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "clear" in done.stdout

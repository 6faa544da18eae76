"""The scripts in examples/ run, learn something, and are short enough to read."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_it_is_short(path: Path) -> None:
    assert path.read_text().count("\n") < 120


def test_plain_loop() -> None:
    assert load("plain_loop.py")["main"]() < 0.5  # ln 64 = 4.16 before


def test_hf_trainer() -> None:
    pytest.importorskip("accelerate")
    assert load("hf_trainer.py")["main"]() < 0.5


# Lightning uses torch's and its own registries in ways that are deprecated.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
# It warns about workers, logging and layers in eval mode (which frozen layers are).
@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_lightning_loop() -> None:
    pytest.importorskip("lightning")
    trainer = load("lightning_loop.py")["main"]()
    assert trainer.callback_metrics["validation_loss"] < 0.5

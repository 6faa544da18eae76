"""Fixtures shared by all tests; `tiny` is a run small enough to be trained many times over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read where PyTorch is imported, here and in subprocesses

import torch

from blocktrain.records.log import read_events
from blocktrain.train import run as run_module
from blocktrain.train.blocks_train_module import BLOCKS
from blocktrain.train.checkpoint import checkpoints
from blocktrain.train.config import RunConfig
from blocktrain.train.toml_dataclasses import override

REPOSITORY = Path(__file__).resolve().parent.parent
MOST_PROCESSES = 8  # each imports PyTorch and transformers
# The files that take longest, the longest first: begun last, one of them would keep a single process busy at the end.
LONG_FILES = [
    "train/test_distributed.py",
    "train/test_growth.py",
    "train/test_prefix_caching.py",
    "optim/test_block_optimizer.py",
    "cli/test_main.py",
    "plan/test_memory.py",
    "optim/test_step_in_backward.py",
    "integrations/test_hf.py",
    "train/test_checkpoint.py",
    "test_bugs.py",
    "train/test_chat_and_labelled.py",
    "train/test_resume.py",
    "test_models.py",
    "compare/test_compare.py",
    "train/test_trainer.py",
    "cli/test_plan.py",
]

MakeConfig = Callable[..., RunConfig]
Outcome = tuple[list[dict[str, Any]], dict[str, str]]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One process for each processor that this one may use; no other process for a single file or test."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    if len(config.args) == 1 and ".py" in config.args[0]:
        return 0
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2, MOST_PROCESSES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, the others in their order; raises `UsageError` where a long file is not there any more."""
    place = {REPOSITORY / "tests" / name: at for at, name in enumerate(LONG_FILES)}
    if gone := [str(path.relative_to(REPOSITORY)) for path in place if not path.is_file()]:
        raise pytest.UsageError(f"LONG_FILES of tests/conftest.py names files that do not exist: {', '.join(gone)}")
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets beside the checkout (or in $BLOCKTRAIN_TEST_DATA); skips where there is none."""
    folder = Path(os.environ.get("BLOCKTRAIN_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data not found at {folder}; set BLOCKTRAIN_TEST_DATA")
    return folder


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of this test open with made-up costs, which it does not look at: counting takes longer than they do."""
    from .train.test_distributed import made_up_opening

    monkeypatch.setattr(run_module, "BLOCKS", replace(BLOCKS, opening=made_up_opening))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 20 kB of Python source."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(Path(json.decoder.__file__).read_text() + Path(json.encoder.__file__).read_text())
    return path


@pytest.fixture(scope="session")
def tiny_mapping(text_file: Path) -> dict[str, Any]:
    """The tables of a tiny run."""
    return {
        "name": "tiny",
        "device": "cpu",
        "text": {"source": str(text_file), "row_tokens": 16, "cache": str(text_file.parent), "validation_share": 0.2},
        "model": {
            "architecture": "gpt2",
            "config": {
                "n_layer": 4,
                "n_embd": 16,
                "n_head": 2,
                "n_positions": 16,
                "attn_pdrop": 0.1,
                "resid_pdrop": 0.1,
            },
        },
        "blocks": {"count": 3},
        "schedule": {"visit": "4 steps", "sweeps": 1},
        "optimizer": {"name": "AdamW", "lr": 0.01, "weight_decay": 0.1, "state": "host", "max_grad_norm": 1.0},
        "learning_rate": {"shape": "cosine", "warmup_steps": 2, "visit_warmup_steps": 2},
        "batch": {"rows": 4},
        "evaluation": {"every": "3 steps", "rows": 8, "batch_rows": 4},
        "checkpoint": {"every": "2 steps", "keep": 2},
    }


@pytest.fixture(scope="session")
def tiny(tiny_mapping: dict[str, Any]) -> MakeConfig:
    """`tiny("optimizer.lr=0.1", ...)`: the tiny run with overrides, as on the command line."""

    def make(*overrides: str) -> RunConfig:
        return RunConfig.from_mapping(override(json.loads(json.dumps(tiny_mapping)), overrides))

    return make


@pytest.fixture(scope="session")
def outcome() -> Callable[[Path], Outcome]:
    """`outcome(folder)` of a finished run."""
    return _outcome


def _outcome(folder: Path) -> Outcome:
    """What must not depend on interruptions: the log but for clocks and peak memory, and the last checkpoint's
    checksums."""
    events = read_events(folder / "events.jsonl")
    log = [{k: v for k, v in event.items() if k not in ("seconds", "peak_memory_bytes")} for event in events]
    manifest = json.loads((checkpoints(folder / "checkpoints")[-1] / "checkpoint.json").read_text())
    return log, {name: entry["sha256"] for name, entry in manifest["files"].items()}

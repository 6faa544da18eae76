"""`run_distributed` returns what the ranks return, and raises `WorkerError` for what they raise."""

from __future__ import annotations

import os
import runpy
import signal
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from blocktrain import testing
from blocktrain.testing import WorkerError, run_distributed


def place(factor: int) -> list[int]:
    return [dist.get_rank() * factor, dist.get_world_size(), os.getpid()]


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 does not want to")
    time.sleep(60)


def die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def sleep() -> None:
    time.sleep(60)


def test_the_example_of_the_module_runs(tmp_path: Path) -> None:
    """As a file that cannot be imported by name, like most tests."""
    _, _, example = (testing.__doc__ or "").partition("at the top level of its file:\n")
    file = tmp_path / "test_example.py"
    file.write_text(textwrap.dedent(example))
    runpy.run_path(str(file))["test_sum_of_ranks"]()


def test_results_come_in_rank_order_and_from_processes_of_their_own() -> None:
    results = run_distributed(place, 3, 10)
    assert [result[:2] for result in results] == [[0, 3], [10, 3], [20, 3]]
    assert len({*(result[2] for result in results), os.getpid()}) == 4


def test_the_first_failure_is_raised_with_its_traceback_and_the_others_are_killed() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 of 2 failed:(.|\n)*fail_on_rank_1(.|\n)*rank 1 does not want to"):
        run_distributed(fail_on_rank_1, 2)
    assert time.monotonic() - start < 50


def test_a_killed_rank_and_one_that_never_ends() -> None:
    with pytest.raises(WorkerError, match=r"rank 0 died \(exit code -9\)"):
        run_distributed(die_on_rank_0, 2)
    with pytest.raises(WorkerError, match="rank 0, 1 did not end in time"):
        run_distributed(sleep, 2, patience_seconds=2)

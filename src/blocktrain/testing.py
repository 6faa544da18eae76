"""Tests of code that trains on several devices: run a function in several processes that form a group.

A test, at the top level of its file:

    import torch
    import torch.distributed as dist

    from blocktrain.testing import run_distributed


    def sum_of_ranks(scale: float) -> float:
        # Runs in each process; torch.distributed is ready there, with gloo on the CPU.
        value = torch.tensor(dist.get_rank() * scale)
        dist.all_reduce(value)
        return value.item()


    def test_sum_of_ranks() -> None:
        assert run_distributed(sum_of_ranks, 2, 0.5) == [0.5, 0.5]  # one result for each rank
"""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# A server process imports these once. Its forks start quickly, and have no threads or devices of the test's process.
_PRELOADED = [
    "blocktrain.train.run",
    "blocktrain.parallel.pipeline",
    "blocktrain.parallel.fsdp",
    "torch._dynamo",  # which torch.optim imports when an optimizer is first made
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]


class WorkerError(Exception):
    """A rank raised an exception (the message has its traceback), died, or did not end in time."""


def run_distributed(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 60.0,
    patience_seconds: float = 300.0,
) -> list[T]:
    """Call `fn(*args)` in each of `world_size` processes that form a gloo group on the CPU, with one thread each.

    fn: a function at the top level of a file; it need not be importable by name.
    args: plain data, and so is what `fn` returns.
    timeout_seconds: how long a rank waits for the others in a collective operation.
    patience_seconds: how long the whole call may take.

    Returns the results in rank order. Raises `WorkerError` for the first failure and kills the other processes. No
    process outlives the call.

        def rank() -> int:
            return torch.distributed.get_rank()

        run_distributed(rank, 3)  # [0, 1, 2]
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    where = (fn.__module__, inspect.getfile(fn), fn.__qualname__)
    timeout = timedelta(seconds=timeout_seconds)
    deadline = time.monotonic() + patience_seconds
    processes: list[BaseProcess] = []
    receivers: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="blocktrain-") as folder:
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                store = f"file://{Path(folder) / 'store'}"  # a file through which the ranks find each other
                group = {"init_method": store, "rank": rank, "world_size": world_size, "timeout": timeout}
                process = context.Process(target=_run_rank, args=(where, args, group, sender), daemon=True)
                process.start()
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            return _collect(processes, receivers, deadline)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(processes: list[BaseProcess], receivers: list[Connection], deadline: float) -> list[Any]:
    """The results of all ranks; raises `WorkerError` for the first failure."""
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        waiting = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorkerError(f"rank {', '.join(str(rank) for rank in waiting.values())} did not end in time")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting[receiver]
            try:
                kind, value = receiver.recv()
            except EOFError:
                processes[rank].join()
                raise WorkerError(f"rank {rank} died (exit code {processes[rank].exitcode})") from None
            if kind == "failed":
                raise WorkerError(f"rank {rank} of {len(processes)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(processes))]


def _run_rank(where: tuple[str, str, str], args: tuple[Any, ...], group: dict[str, Any], sender: Connection) -> None:
    """What one process does: join the group, call the function, send its result or its traceback."""
    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **group)
        sender.send(("done", _function(*where)(*args)))
        dist.destroy_process_group()
    except BaseException:
        sender.send(("failed", traceback.format_exc()))


def _function(module: str, file: str, name: str) -> Callable[..., Any]:
    """The function `name` of `file`. The file is loaded as `module` unless that is imported already: test files are
    often not importable by name."""
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None, f"'{file}' is a Python file"
        assert spec.loader is not None, f"'{file}' is a Python file"
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found

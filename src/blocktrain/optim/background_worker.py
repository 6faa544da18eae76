"""Work that goes on behind the steps, in one thread, in the order it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundWorker:
    """A thread that starts with the first piece of work; the process ends after the last one."""

    def __init__(self, name: str):
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._under_way: list[Future[Any]] = []

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Begin `work` when what was submitted before is done."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"blocktrain-{self._name}")
        future = self._executor.submit(work)
        self._under_way.append(future)
        return future

    def wait(self) -> None:
        """Return when all of it is done; raises the first error, once."""
        done, self._under_way = self._under_way, []
        errors = [future.exception() for future in done]
        for error in errors:
            if error is not None:
                raise error

    def forget(self) -> None:
        """Return when all of it is done, whatever came of it."""
        done, self._under_way = self._under_way, []
        for future in done:
            future.exception()

"""One thread for work in the background of training, done in the order in which it was submitted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundWorker:
    """A thread that starts with the first piece of work. The process does not end before the last one is done."""

    def __init__(self, name: str):
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._pending: list[Future[Any]] = []

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Start `work` when all work submitted before it is done."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"blocktrain-{self._name}")
        future = self._executor.submit(work)
        self._pending.append(future)
        return future

    def wait(self) -> None:
        """Return when all work is done. Raises the first error, once."""
        submitted, self._pending = self._pending, []
        errors = [future.exception() for future in submitted]
        for error in errors:
            if error is not None:
                raise error

    def forget(self) -> None:
        """Return when all work is done, and ignore its errors."""
        submitted, self._pending = self._pending, []
        for future in submitted:
            future.exception()

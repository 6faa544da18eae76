"""Ctrl-C and SIGTERM ask the trainer to stop after the step in hand; a second one stops at once.

Not under torchrun, which passes a signal on to processes that have had it already, and after 30 s kills them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


@dataclass
class StopRequest:
    """The signal that came, if one did."""

    signal_number: int | None = None


@contextmanager
def stop_requests(*, second: Literal["stops", "is the same"] = "stops") -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM inside the `with`. Outside the main thread nothing is caught.

    second: what another signal means that comes after the first.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _frame: object) -> None:
        if request.signal_number is not None and second == "stops":
            raise KeyboardInterrupt
        request.signal_number = number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

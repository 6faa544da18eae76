"""Ctrl-C, SIGTERM and SIGHUP ask the trainer to stop after the step in hand; a second one stops at once.

A second SIGHUP does not: a terminal that closes may send several. Neither does any second signal under torchrun, which
passes a signal on to processes that have had it already, and after 30 s kills them.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

log = logging.getLogger(__name__)


@dataclass
class StopRequest:
    """The signal that came, if one did."""

    signal_number: int | None = None


@contextmanager
def stop_requests(*, second: Literal["stops", "is the same"] = "stops") -> Iterator[StopRequest]:
    """Catch SIGINT, SIGTERM and SIGHUP inside the `with`; a SIGHUP that is ignored (`nohup`) stays ignored.

    Outside the main thread nothing is caught.

    second: what another signal means that comes after the first.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number: int, _frame: object) -> None:
        if request.signal_number is not None and second == "stops" and number != signal.SIGHUP:
            raise KeyboardInterrupt
        is_first = request.signal_number is None
        request.signal_number = number  # before the message, during which the next signal may come
        if is_first and number == signal.SIGINT and second == "stops":
            log.warning("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once, without one")

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

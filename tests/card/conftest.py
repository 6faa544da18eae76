"""The process that believes it has a card; see `pretend_card.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pretend_card
import pytest


@pytest.fixture(scope="session")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """Runs functions in a process with a pretended card: `card.submit(function, *arguments).result()`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "LD_PRELOAD", str(pretend_card.compile_card(tmp_path_factory.mktemp("card"))))
        pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=pretend_card.install)
        pool.submit(os.getpid).result()  # the process has started
    with pool:
        yield pool

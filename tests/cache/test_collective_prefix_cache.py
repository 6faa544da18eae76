"""Ranks that must run layers together: if one has to compute, all do, and if one fails, all raise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import blocktrain as bt
from blocktrain.cache.collective_prefix_cache import FAILED, CollectivePrefixCache
from blocktrain.cache.encoding import Encoding, Fields
from blocktrain.cache.store import MemoryStore, RowLayout
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.errors import StorageError

SLOTS = 8
KEY = {"rows": "first"}
CPU = torch.device("cpu")
HALF, REST = np.arange(4), np.arange(4, SLOTS)


class FillableStore(MemoryStore):
    """A store that refuses to write once `full` is set."""

    full = False

    def write(self, slots: np.ndarray, rows: Fields) -> None:
        if self.full:
            raise StorageError("no room left")
        super().write(slots, rows)


class Pair:
    """This rank, and another one that exists only as the boundary it reports: by default the same as this rank's."""

    def __init__(self):
        config = GPT2Config(
            n_layer=4, n_embd=16, n_head=2, vocab_size=64, n_positions=8, bos_token_id=0, eos_token_id=0
        )
        torch.manual_seed(0)
        self.model = GPT2LMHeadModel(config).eval()
        self.inputs = torch.randint(0, 64, (SLOTS, 8))
        self.runner = BoundaryRunner(bt.partition(self.model, num_blocks=3).chain)
        self.other: Callable[[int], int] = lambda mine: mine
        self.store: FillableStore | None = None
        self.cache = CollectivePrefixCache(
            self.runner,
            all_gather=lambda mine: [mine, self.other(mine)],
            num_slots=SLOTS,
            encoding=Encoding("compute"),
            make_store=self.make_store,
        )

    def make_store(self, _name: str, slots: int, layout: RowLayout) -> FillableStore:
        self.store = FillableStore(slots, layout, device=CPU)
        return self.store

    def open(self, boundary: int) -> None:
        self.cache.open(boundary, key=KEY, sample={"input_ids": self.inputs[:1]})

    def fetch(self, slots: np.ndarray) -> Tensor:
        return self.cache.fetch(slots, {"input_ids": self.inputs[slots]})

    def expected(self, slots: np.ndarray, boundary: int) -> Tensor:
        return self.runner.states({"input_ids": self.inputs[slots]}, [boundary])[boundary]


def test_rows_that_every_rank_has_are_read_and_nothing_runs() -> None:
    pair = Pair()
    pair.open(2)
    for _ in range(2):
        for slots in (HALF, REST):
            pair.cache.prefetch(slots)
            assert torch.equal(pair.fetch(slots), pair.expected(slots, 2))
    seen = pair.cache.statistics
    assert (seen.requested, seen.hits, seen.computed, seen.layers_run) == (16, 8, 8, {(0, 2): 8})


def test_rows_that_another_rank_lacks_are_computed_here_too_from_the_inputs() -> None:
    pair = Pair()
    pair.open(2)
    pair.fetch(HALF)
    pair.other = lambda mine: 0
    assert torch.equal(pair.fetch(HALF), pair.expected(HALF, 2))
    mixed = np.array([1, 6])  # here one stored and one missing row; on the other rank both are stored
    pair.other = lambda mine: 2
    assert torch.equal(pair.fetch(mixed), pair.expected(mixed, 2))
    assert pair.cache.statistics.layers_run == {(0, 2): 4 + 4 + 2}
    assert pair.cache.statistics.hits == 0


def test_all_ranks_compute_from_the_boundary_that_every_rank_has() -> None:
    pair = Pair()
    pair.open(2)
    pair.cache.fill(HALF, {"input_ids": pair.inputs[HALF]})
    pair.cache.fill(REST, {"input_ids": pair.inputs[REST]})
    pair.open(4)
    assert torch.equal(pair.fetch(HALF), pair.expected(HALF, 4))
    pair.other = lambda mine: 0  # its rows were damaged
    assert torch.equal(pair.fetch(REST), pair.expected(REST, 4))
    assert pair.cache.statistics.layers_run == {(2, 4): 4, (0, 4): 4}
    assert list(pair.cache.missing(HALF)) == list(HALF), "another rank may lack them"


def test_a_full_store_on_this_rank_ends_the_cache_on_all_ranks_one_pass_later() -> None:
    """The pass was collective, so its result is used; the error is raised at the next agreement."""
    pair = Pair()
    pair.open(2)
    pair.fetch(HALF)
    assert pair.store is not None
    pair.store.full = True
    assert torch.equal(pair.fetch(REST), pair.expected(REST, 2))
    with pytest.raises(StorageError, match="no room left"):
        pair.fetch(HALF)


def test_a_full_store_on_another_rank_ends_the_cache_here() -> None:
    pair = Pair()
    pair.open(2)
    pair.other = lambda mine: FAILED
    with pytest.raises(StorageError, match="another process cannot store or read its rows"):
        pair.fetch(HALF)
    with pytest.raises(StorageError, match="another process"):
        pair.open(4)

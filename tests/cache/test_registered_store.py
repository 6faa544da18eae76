"""A store that this file defines and registers works in a cache, in the configuration of a run, and in its records."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import blocktrain as bt
from blocktrain.cache.cost_model import CacheFacts, VisitReuse, choose
from blocktrain.cache.encoding import Encoding, EncodingKind, Fields
from blocktrain.cache.prefix_cache import PrefixCache
from blocktrain.cache.store import STORES, RowLayout, StoreKind, as_bytes, slot_bytes
from blocktrain.chain.boundary import BoundaryRunner
from blocktrain.errors import ConfigError
from blocktrain.records.log import read_events

VISIT = ["prefix.store=compressed", "schedule.visit=4 steps", "schedule.sweeps=1", "blocks.count=2"]


class CompressedStore:
    """Rows in host memory, each compressed by zlib."""

    written = 0  # rows, by all stores of this class

    def __init__(self, _folder: Path, num_slots: int, layout: RowLayout, _device: torch.device):
        self.nbytes = num_slots * slot_bytes(layout)
        self.folder: Path | None = None
        self._layout = layout
        self._rows: dict[tuple[str, int], bytes] = {}

    def write(self, slots: np.ndarray, rows: Fields) -> None:
        for name in self._layout:
            for slot, row in zip(slots.tolist(), as_bytes(rows[name]), strict=True):
                self._rows[name, slot] = zlib.compress(row.tobytes())
        type(self).written += len(slots)

    def read(self, slots: np.ndarray) -> Fields:
        found = {}
        for name, field in self._layout.items():
            data = b"".join(zlib.decompress(self._rows[name, slot]) for slot in slots.tolist())
            found[name] = torch.frombuffer(bytearray(data), dtype=field.dtype).view(len(slots), *field.shape)
        return found

    def close(self, *, keep_files: bool = False) -> None:
        self._rows = {}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORES, "compressed", StoreKind(make=CompressedStore, medium="host"))
    monkeypatch.setattr(CompressedStore, "written", 0)


@pytest.mark.parametrize("kind", ["compute", "int8"])
def test_a_prefix_cache_reads_what_it_wrote(tmp_path: Path, kind: EncodingKind) -> None:
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    inputs = torch.randint(0, 64, (6, 8))
    device = torch.device("cpu")
    runner = BoundaryRunner(bt.partition(model, num_blocks=2).chain)
    cache = PrefixCache(
        runner,
        num_slots=6,
        encoding=Encoding(kind),
        make_store=lambda name, slots, layout: STORES["compressed"].make(tmp_path / name, slots, layout, device),
    )
    cache.open(2, key={"rows": "these"}, sample={"input_ids": inputs[:1]})
    slots = np.array([4, 0, 5])
    first, second = (cache.fetch(slots, {"input_ids": inputs[slots]}) for _ in range(2))
    expected = runner.states({"input_ids": inputs[slots]}, [2])[2]
    assert torch.equal(first, second)
    assert torch.equal(first, expected) == (kind == "compute")
    assert (cache.statistics.hits, CompressedStore.written) == (3, 3)
    cache.close()


def test_the_cost_model_takes_it_where_it_is_the_first_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"host": 1e9}
    facts = CacheFacts(
        visits=[VisitReuse(uses=4, prefix_flops=10**9, fill_flops=10**9)],
        num_slots=10,
        row_bytes=1000,
        flops_per_second=1e9,
        read_bytes_per_second=rates,  # pyright: ignore[reportArgumentType]
        write_bytes_per_second=rates,  # pyright: ignore[reportArgumentType]
        free_bytes={"host": 1e9},
    )
    assert choose(facts).place == "host"
    monkeypatch.delitem(STORES, "host")
    assert choose(facts).place == "compressed"


def test_a_run_trains_with_it_as_with_any_store(tiny: Callable[..., bt.RunConfig], tmp_path: Path) -> None:
    losses = {}
    for store in ("compressed", "off"):
        bt.run(tiny(*VISIT, f"prefix.store={store}"), tmp_path / store)
        events = list(read_events(tmp_path / store / "events.jsonl"))
        losses[store] = [event["loss"] for event in events if event["kind"] == "step"]
        places = [event["place"] for event in events if event["kind"] == "cached"]
        assert places == (["compressed"] if store == "compressed" else [])
    assert losses["compressed"] == losses["off"]
    assert CompressedStore.written > 0


def test_a_store_that_nobody_registered_is_an_error(tiny: Callable[..., bt.RunConfig]) -> None:
    with pytest.raises(ConfigError, match=r"\[prefix\] store 'compresed' is unknown; did you mean 'compressed'"):
        tiny("prefix.store=compresed")

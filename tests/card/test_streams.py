"""Every copy is waited for before it is used; the stand-in finds it where one is not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from recorded_streams import TooEarlyError, recorded

import blocktrain as bt
from blocktrain.cache import prefix_cache
from blocktrain.cache.store import STORES, MemoryStore, StoreKind
from blocktrain.modules import host_boundaries
from blocktrain.optim import state_store
from blocktrain.optim.precision import BF16_EXACT, INT8, Precision
from blocktrain.optim.weight_store import OnHost
from blocktrain.runtime import SideStream

from ..tiny_models import llama


class AtOnce:
    """A thread pool whose work is done before `submit` returns."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args))
        return future

    def shutdown(self, **_: Any) -> None:
        pass


def _unpinned(empty: Callable[..., Any], *shape: Any, pin_memory: bool = False, **options: Any) -> Any:
    return empty(*shape, **options)


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("precision", [BF16_EXACT, INT8], ids=lambda precision: precision.name)
def test_visits_use_nothing_that_is_on_its_way(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights streamed in, layers' inputs offloaded, moments kept on the host: the losses are those without streams."""
    losses: dict[bool, list[float]] = {True: [], False: []}
    for with_streams, seen in losses.items():
        torch.manual_seed(0)
        partition = bt.partition(llama(), num_blocks=3)
        with recorded() as (streams, side):
            if with_streams:
                monkeypatch.setattr(state_store, "SideStream", side)
                monkeypatch.setattr(host_boundaries, "SideStream", side)
            optimizer = bt.BlockOptimizer(
                partition,
                torch.optim.AdamW,
                lr=1e-2,
                precision=precision,
                frozen=OnHost(side_stream=side if with_streams else SideStream),
                state=bt.KeepOnHost(),
            )
            with bt.checkpointing(partition, boundaries="host"):
                for visit in range(4):
                    with optimizer.visit(partition[visit % 3]):
                        for step in range(2):
                            loss = partition.model(**batch(2 * visit + step)).loss
                            loss.backward()
                            optimizer.step()
                            optimizer.zero_grad()
                            seen.append(loss.item())
            optimizer.close()
            assert (streams.copies > 100) == with_streams
            del optimizer
        monkeypatch.undo()
    assert losses[True] == losses[False]


@pytest.mark.usefixtures("uncounted")
def test_a_run_from_a_prefix_cache_uses_nothing_that_is_on_its_way(
    tiny, outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = ["model.config.attn_pdrop=0.0", "sampling.scope=sweep", "sampling.rate=0.02", "schedule.visit=2 epochs"]
    config = tiny(*still, "prefix.store=host")
    bt.run(config, tmp_path / "plain")
    pinned = StoreKind(
        make=lambda _folder, slots, layout, device: MemoryStore(slots, layout, device=torch.device("cpu"), pin=True),
        medium="host",
    )
    with recorded() as (streams, side):
        monkeypatch.setitem(STORES, "host", pinned)
        monkeypatch.setattr(prefix_cache, "SideStream", side)
        monkeypatch.setattr(prefix_cache, "ThreadPoolExecutor", AtOnce)  # a mode sees the operations of one thread
        monkeypatch.setattr(torch, "empty", partial(_unpinned, torch.empty))
        bt.run(config, tmp_path / "streams")
        assert streams.copies > 10
    assert outcome(tmp_path / "streams")[1] == outcome(tmp_path / "plain")[1]


# -- the stand-in itself ----------------------------------------------------------------------------------------------


def test_reading_a_copy_too_early_is_found() -> None:
    with recorded() as (_, side_stream):
        side = side_stream(torch.device("cpu"))
        copy = side.to_device(torch.ones(3))
        with pytest.raises(TooEarlyError, match="before the copy to the device"):
            copy.sum()
        side.join()
        assert copy.sum() == 3
        copy = side.to_host(copy)
        side.join()
        with pytest.raises(TooEarlyError, match="before the copy to the host"):
            copy.sum()
        side.wait()
        assert copy.sum() == 3


def test_a_source_that_changes_or_dies_on_its_way_is_found() -> None:
    with recorded() as (streams, side_stream):
        side = side_stream(torch.device("cpu"))
        source = torch.ones(3)
        copy = side.to_device(source)
        with pytest.raises(TooEarlyError, match="overwrites the source"):
            source.zero_()
        side.wait()
        source.zero_()
        del copy
        copy = side.to_device(torch.ones(3))
        del copy
        assert streams.problems == ["a copy on the device was freed while it was on its way"]
        streams.problems.clear()


def test_a_store_that_does_not_join_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = bt.partition(llama(), num_blocks=3)
    with recorded() as (streams, side_stream):
        optimizer = bt.BlockOptimizer(partition, torch.optim.SGD, lr=0.1, frozen=OnHost(side_stream=side_stream))
        side = optimizer._weights._store._side
        assert side is not None
        monkeypatch.setattr(side, "join", MethodType(lambda self: None, side))
        with pytest.raises(TooEarlyError, match="before the copy to the device"):
            partition.model(**batch(0))
        streams.synchronize()
        streams.problems.clear()

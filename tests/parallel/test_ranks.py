"""The collectives between ranks, and what happens when one of them does not answer."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from blocktrain.errors import ConfigError, PeerError
from blocktrain.parallel.bucketed_all_reduce import MAX_IN_FLIGHT, BucketedAllReduce, make_buckets
from blocktrain.parallel.ranks import Ranks, open_ranks
from blocktrain.parallel.replicas import checksum
from blocktrain.testing import run_distributed


def refuse() -> None:
    raise ConfigError("this cannot be")


def call_everything() -> dict[str, Any]:
    """Every kind of call once."""
    with open_ranks() as ranks:
        results: dict[str, Any] = {"rank": ranks.rank, "first": ranks.is_rank0, "size": ranks.size}
        results["gathered"] = ranks.all_gather([ranks.rank, 2.0**53 - 1, float("nan")])
        results["from rank 0"] = ranks.rank0_broadcast(
            lambda: {"rank": ranks.rank, "none": None, "text": "ü", "number": 0.1}
        )
        try:
            ranks.rank0_broadcast(refuse)
        except ConfigError as error:
            results["refused"] = str(error)
        except PeerError as error:
            results["refused elsewhere"] = str(error)
        tensors = [torch.full((count,), float(ranks.rank + 1)) for count in (3, 1, 5, 2, 2, 2, 2)]
        all_reduce = BucketedAllReduce(ranks, dtype=torch.float32)
        for bucket in ([0, 1], [2], [3], [4], [5, 6]):  # more than are in flight at once
            all_reduce.start([tensors[index] for index in bucket])
        all_reduce.wait()
        results["sums"] = [tensor.tolist() for tensor in tensors]
        results["bytes"] = ranks.all_reduced_bytes
        ranks.barrier()
        return results


@pytest.mark.parametrize("size", [2, 4])
def test_every_kind_of_call(size: int) -> None:
    results = run_distributed(call_everything, size)
    assert [mine["rank"] for mine in results] == list(range(size))
    assert [mine["first"] for mine in results] == [True] + [False] * (size - 1)
    for mine in results:
        assert [values[:2] for values in mine["gathered"]] == [[float(rank), 2.0**53 - 1] for rank in range(size)]
        assert all(values[2] != values[2] for values in mine["gathered"])
        assert mine["from rank 0"] == {"rank": 0, "none": None, "text": "ü", "number": 0.1}
        total = size * (size + 1) / 2
        assert mine["sums"] == [[total] * count for count in (3, 1, 5, 2, 2, 2, 2)]
        assert mine["bytes"] == 4 * 17
    assert results[0]["refused"] == "this cannot be"
    assert all("rank 0 did: this cannot be" in mine["refused elsewhere"] for mine in results[1:])


def test_alone_every_call_returns_its_input() -> None:
    with open_ranks() as ranks:
        assert (ranks.rank, ranks.size, ranks.is_rank0) == (0, 1, True)
        assert ranks.all_gather([1, 2.5]) == [[1, 2.5]]
        assert ranks.rank0_broadcast(lambda: "x") == "x"
        tensor = torch.ones(3)
        ranks.all_reduce(tensor)()
        ranks.barrier()
        assert tensor.tolist() == [1, 1, 1]
        assert ranks.all_reduced_bytes == 0
        with pytest.raises(ConfigError, match="this cannot be"):
            ranks.rank0_broadcast(refuse)


def hang() -> tuple[str, float]:
    """Rank 1 calls too late, by more than the timeout of the process group."""
    with open_ranks(timeout_seconds=2) as ranks:
        ranks.barrier()
        if ranks.rank == 1:
            time.sleep(3)
        start = time.monotonic()
        try:
            wait = ranks.all_reduce(torch.ones(4))
            wait()
            ranks.barrier()
        except PeerError as error:
            return str(error), time.monotonic() - start
        return "no error", 0.0


def test_a_hung_peer_is_an_error_on_every_rank_within_the_timeout() -> None:
    results = run_distributed(hang, 2, timeout_seconds=2, patience_seconds=60)
    for rank, (message, seconds) in enumerate(results):
        assert f"rank {rank} of 2 got no answer from the others" in message
        assert "distributed.timeout_seconds = 2" in message
        assert seconds < 3


def test_buckets_keep_the_order_and_the_limit() -> None:
    assert make_buckets([], 4) == []
    assert make_buckets([1, 2, 2, 9, 1], 4) == [[0, 1], [2], [3], [4]]
    assert MAX_IN_FLIGHT >= 1


def test_the_checksum_sees_one_bit_and_the_order_of_tensors() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool):
        one, two = torch.arange(6).to(dtype), torch.arange(6).to(dtype)
        assert checksum([one, two[:3]]) == checksum([two, one[:3]])
        assert checksum([one, two[:3]]) != checksum([two[:3], one])
        flipped = one.clone()
        flipped.view(torch.uint8)[0] ^= 1
        assert checksum([flipped]) != checksum([one])
    assert 0 <= checksum([torch.full((1000,), -1.0)]) < 2**64
    assert checksum([torch.zeros(0)]) == 0


def test_ranks_of_one_are_no_special_case() -> None:
    all_reduce = BucketedAllReduce(Ranks(), dtype=torch.float32)
    tensors = [torch.tensor([1.5]), torch.tensor([2.5])]
    all_reduce.start(tensors)
    all_reduce.wait()
    assert [tensor.item() for tensor in tensors] == [1.5, 2.5]


def test_one_card_for_all_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun with `device = "cuda:0"` put every process on one card."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(ConfigError, match=r"every process of this machine on one card: write 'cuda'"),
        open_ranks("cuda:0"),
    ):
        pass

"""Rows that are stale, damaged, half-written or of another subset are never read as valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import blocktrain as bt
from blocktrain.cache.encoding import Fields
from blocktrain.cache.slot_ledger import Fingerprints, Ledger, checksums
from blocktrain.cache.store import FileStore, layout_of
from blocktrain.chain.discovery import find_chain
from blocktrain.errors import StorageError
from blocktrain.modules.placeholder import is_placeholder

KEY = {"rows": "abc", "encoding": "compute"}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))


def change(sequential: nn.Sequential, name: str) -> None:
    """The last number of a weight or buffer."""
    with torch.no_grad():
        {**dict(sequential.named_parameters()), **dict(sequential.named_buffers())}[name].view(-1)[-1:].add_(1)


def rows(count: int, seed: int = 0) -> Fields:
    generator = torch.Generator().manual_seed(seed)
    return {
        "data": torch.randint(-100, 100, (count, 3, 8), dtype=torch.int8, generator=generator),
        "scale": torch.rand(count, 3, 1, generator=generator),
    }


class StoreOnDisk:
    """A file store with its ledger, as the cache keeps them."""

    def __init__(self, folder: Path, slots: int = 8, **key: Any):
        self.store = FileStore(folder, slots, layout_of(rows(1)))
        self.ledger = Ledger(slots, key={**KEY, **key}, folder=folder)

    def put(self, slots: list[int], boundary: int, *, seed: int = 0) -> None:
        self.store.write(np.array(slots), rows(len(slots), seed))
        self.ledger.mark(np.array(slots), boundary, rows(len(slots), seed))


# -- fingerprints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boundary", [1, 2, 3])
def test_a_fingerprint_covers_every_weight_and_buffer_below_its_boundary_and_nothing_above(boundary: int):
    sequential = model()
    chain = find_chain(sequential)
    tensors = {**dict(sequential.named_parameters()), **dict(sequential.named_buffers())}
    before = Fingerprints(chain).at([boundary])
    assert list(before) == [boundary]
    for name, tensor in tensors.items():
        saved = tensor.detach().clone()
        change(sequential, name)
        assert (Fingerprints(chain).at([boundary]) == before) == (int(name.split(".")[0]) >= boundary), name
        with torch.no_grad():
            tensor.copy_(saved)
    assert Fingerprints(chain).at([boundary]) == before


def test_fingerprints_of_several_boundaries_are_those_of_each():
    chain = find_chain(model())
    together = Fingerprints(chain).at({3, 1, 2})
    assert together == {boundary: Fingerprints(chain).at([boundary])[boundary] for boundary in (1, 2, 3)}
    assert len(set(together.values())) == 3
    assert Fingerprints(chain).at([]) == {}
    assert Fingerprints(chain).at([1, 99]) == {1: together[1]}


def test_a_layer_is_read_once_whatever_is_asked_for_later():
    """A change between two calls is seen in the layers that the first call has not read, and only in those."""
    sequential = model()
    chain = find_chain(sequential)
    now, before = Fingerprints(chain), Fingerprints(chain).at([1, 2, 3])
    assert now.at([2]) == {2: before[2]}
    change(sequential, "0.weight")
    assert now.at([1, 3, 2]) == before
    assert Fingerprints(chain).at([1])[1] != before[1]


def test_fingerprints_of_sharded_weights_cover_the_shards_of_all_ranks():
    """A change in another rank's shard is seen here too, at every boundary above it."""
    chain = find_chain(model())
    parts = {"elsewhere": "before"}
    asked: list[str] = []

    def of_all(digest: str) -> str:
        asked.append(digest)
        return digest + parts["elsewhere"]

    before = Fingerprints(chain, combine=of_all).at([1, 2])
    assert list(before.values()) == [f"{digest}before" for digest in asked]
    assert asked == list(Fingerprints(chain).at([1, 2]).values())
    parts["elsewhere"] = "after"
    assert set(Fingerprints(chain, combine=of_all).at([1, 2]).values()).isdisjoint(before.values())


def test_the_smallest_change_of_a_weight_in_any_dtype_is_seen():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sequential = model().to(dtype)
        chain = find_chain(sequential)
        before = Fingerprints(chain).at([1])
        weight: Any = sequential[0].weight
        with torch.no_grad():
            weight.view(torch.int16 if weight.itemsize == 2 else torch.int32)[0, 0] ^= 1  # one bit
        assert Fingerprints(chain).at([1]) != before


def test_a_tied_head_belongs_to_the_fingerprint_of_the_embedding():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0)
    gpt2 = GPT2LMHeadModel(config)
    parts = bt.partition(gpt2, num_blocks=2)
    before = Fingerprints(parts.chain).at([1])
    with torch.no_grad():
        gpt2.lm_head.weight[0, 0] += 1
    assert Fingerprints(parts.chain).at([1]) != before


@pytest.mark.parametrize("precision", [bt.INT8, bt.NF4], ids=lambda precision: precision.name)
def test_quantized_weights_have_different_fingerprints(precision: bt.Precision):
    """Their placeholders cannot be read, so the quantized tensors must be hashed."""
    found = set()
    for number in (0.0, 1.0):
        sequential = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with torch.no_grad():
            for p in sequential.parameters():
                p.fill_(number)
                p.view(-1)[0] = 2
        bt.BlockOptimizer(bt.partition(sequential, num_blocks=2), torch.optim.SGD, precision=precision)
        assert is_placeholder(sequential.get_parameter("0.weight"))
        found.add(Fingerprints(find_chain(sequential)).at([1])[1])
    assert len(found) == 2


def test_weights_on_the_host_are_those_on_the_device():
    found = set()
    for place in (bt.OnDevice(), bt.OnHost()):
        torch.manual_seed(0)
        parts = bt.partition(model(), num_blocks=2)
        bt.BlockOptimizer(parts, torch.optim.SGD, precision=bt.BF16_EXACT, frozen=place)
        found.add(Fingerprints(parts.chain).at([2])[2])
    assert len(found) == 1


# -- stale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
def test_slots_whose_layers_changed_are_dropped(tmp_path: Path, on_disk: bool):
    sequential = model()
    chain = find_chain(sequential)
    ledger = Ledger(6, key=KEY, folder=tmp_path if on_disk else None)
    assert ledger.drop_stale(Fingerprints(chain).at([1, 2, 3])) == 0
    ledger.mark(np.array([0, 1]), 1, rows(2))
    ledger.mark(np.array([2, 3]), 2, rows(2))
    ledger.mark(np.array([4]), 3, rows(1))

    change(sequential, "3.weight")  # above all of them
    assert ledger.drop_stale(Fingerprints(chain).at([1, 2, 3])) == 0
    assert ledger.boundaries.tolist() == [1, 1, 2, 2, 3, 0]

    change(sequential, "2.weight")
    assert ledger.drop_stale(Fingerprints(chain).at([1, 2, 3])) == 1
    assert ledger.boundaries.tolist() == [1, 1, 2, 2, 0, 0]

    change(sequential, "1.running_mean")
    assert ledger.drop_stale(Fingerprints(chain).at([1, 2, 3])) == 2
    assert ledger.boundaries.tolist() == [1, 1, 0, 0, 0, 0]


def test_rows_of_a_boundary_without_a_fingerprint_are_dropped():
    """There was none when the rows were stored and there is none now: these once passed for equal fingerprints."""
    ledger = Ledger(3, key=KEY)
    ledger.mark(np.array([0, 2]), 99, rows(2))
    assert ledger.drop_stale({1: "a"}) == 2
    assert ledger.boundaries.tolist() == [0, 0, 0]


# -- on disk ----------------------------------------------------------------------------------------------------------


def test_a_ledger_with_an_equal_key_is_continued(tmp_path: Path):
    stored = StoreOnDisk(tmp_path)
    stored.ledger.drop_stale({1: "a", 2: "b"})
    stored.put([5, 1, 2], 2)
    again = StoreOnDisk(tmp_path)
    assert again.ledger.boundaries.tolist() == [0, 2, 2, 0, 0, 2, 0, 0]
    assert again.ledger.made_from == {1: "a", 2: "b"}
    assert again.ledger.drop_damaged(again.store, rows_at_once=2) == 0
    assert again.ledger.drop_stale({2: "b"}) == 0
    assert torch.equal(again.store.read(np.array([5, 1, 2]))["data"], rows(3)["data"])


@pytest.mark.parametrize(
    "other", [{"rows": "abd"}, {"encoding": "int8"}, {"torch": "9.9"}], ids=["rows", "encoding", "version"]
)
def test_another_key_starts_an_empty_ledger(tmp_path: Path, other: dict[str, Any]):
    StoreOnDisk(tmp_path).put([0, 1], 1)
    assert not StoreOnDisk(tmp_path, **other).ledger.boundaries.any()
    assert not StoreOnDisk(tmp_path).ledger.boundaries.any()  # the old entries are deleted, too


def test_another_number_of_slots_starts_an_empty_ledger(tmp_path: Path):
    StoreOnDisk(tmp_path).put([0, 1], 1)
    assert not StoreOnDisk(tmp_path, slots=9).ledger.boundaries.any()


@pytest.mark.parametrize("name", ["data", "scale"])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_found(tmp_path: Path, name: str, bit: int):
    stored = StoreOnDisk(tmp_path)
    stored.put([6, 0, 3, 4], 1)
    path = tmp_path / f"{name}.rows"
    data = bytearray(path.read_bytes())
    width = len(data) // 8
    data[3 * width + 5] ^= 1 << bit
    path.write_bytes(data)
    again = StoreOnDisk(tmp_path)
    assert again.ledger.drop_damaged(again.store, rows_at_once=3) == 1
    assert np.flatnonzero(again.ledger.boundaries).tolist() == [0, 4, 6]
    assert again.ledger.drop_damaged(again.store) == 0


def test_a_flipped_bit_in_the_boundary_is_found(tmp_path: Path):
    """Rows of boundary 1 must not be read as rows of boundary 3, even if their bytes are intact: the checksum starts
    with the boundary."""
    stored = StoreOnDisk(tmp_path)
    stored.put([0, 1], 1)
    stored.put([2], 3)
    slots = bytearray((tmp_path / "slots.bin").read_bytes())
    slots[0] ^= 2
    (tmp_path / "slots.bin").write_bytes(slots)
    again = StoreOnDisk(tmp_path)
    assert again.ledger.boundaries[:3].tolist() == [3, 1, 3]
    assert again.ledger.drop_damaged(again.store) == 1
    assert again.ledger.boundaries[:3].tolist() == [0, 1, 3]


def test_a_row_that_was_not_marked_or_is_half_overwritten_is_not_valid(tmp_path: Path):
    stored = StoreOnDisk(tmp_path)
    stored.put([0, 1, 2], 1)
    stored.store.write(np.array([3]), rows(1))  # killed before the mark
    stored.ledger.unmark(np.array([1]))  # killed while slot 1 was written over
    stored.store.write(np.array([1]), rows(1, seed=9))
    again = StoreOnDisk(tmp_path)
    assert np.flatnonzero(again.ledger.boundaries).tolist() == [0, 2]
    assert again.ledger.drop_damaged(again.store) == 0


def test_a_mark_that_reached_the_disk_before_its_row_is_found(tmp_path: Path):
    """After a power cut the pages of two files are on the disk in any order."""
    stored = StoreOnDisk(tmp_path)
    stored.put([0, 1], 1)
    stored.ledger.mark(np.array([2]), 1, rows(1, seed=5))
    again = StoreOnDisk(tmp_path)
    assert again.ledger.drop_damaged(again.store) == 1
    assert np.flatnonzero(again.ledger.boundaries).tolist() == [0, 1]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"key": null}', '{"key": {}, "made_from": 3}', '{"made_from": {}}'],
    ids=["empty", "torn", "a list", "no key", "another key", "key missing"],
)
def test_a_damaged_ledger_file_starts_an_empty_ledger(tmp_path: Path, text: str):
    StoreOnDisk(tmp_path).put([0], 1)
    (tmp_path / "ledger.json").write_text(text)
    assert not StoreOnDisk(tmp_path).ledger.boundaries.any()


def test_fingerprints_that_are_not_a_mapping_start_an_empty_ledger(tmp_path: Path):
    StoreOnDisk(tmp_path).put([0], 1)
    saved = json.loads((tmp_path / "ledger.json").read_text())
    for wrong in (3, [1], {"one": "a"}):
        (tmp_path / "ledger.json").write_text(json.dumps({**saved, "made_from": wrong}))
        assert not StoreOnDisk(tmp_path).ledger.boundaries.any()
        StoreOnDisk(tmp_path).put([0], 1)


def test_slots_without_their_file_and_with_a_short_one(tmp_path: Path):
    StoreOnDisk(tmp_path).put([0, 7], 1)
    slots = (tmp_path / "slots.bin").read_bytes()
    (tmp_path / "slots.bin").write_bytes(slots[:20])
    assert np.flatnonzero(StoreOnDisk(tmp_path).ledger.boundaries).tolist() == [0]
    (tmp_path / "slots.bin").unlink()
    assert not StoreOnDisk(tmp_path).ledger.boundaries.any()


def test_closing_deletes_the_files(tmp_path: Path):
    stored = StoreOnDisk(tmp_path / "here")
    stored.put([0], 1)
    stored.store.close()
    stored.ledger.close()
    assert list((tmp_path / "here").iterdir()) == []


def test_a_ledger_in_memory_leaves_no_file(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = Ledger(4, key=KEY)
    ledger.mark(np.array([1]), 2, rows(1))
    ledger.drop_stale({2: "a"})
    ledger.close()
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_the_ledger(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write"):
        Ledger(4, key=KEY, folder=tmp_path / "file")


def test_checksums_differ_by_row_field_and_boundary():
    some = rows(2)
    swapped = {"data": some["data"].flip(0), "scale": some["scale"]}
    found = checksums(some, np.array([1, 1]))
    assert found.dtype == np.uint32
    assert len({*found, *checksums(swapped, np.array([1, 1])), *checksums(some, np.array([2, 2]))}) == 6

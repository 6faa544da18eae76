"""Every row is what the model would compute, and as few layers as possible run, whatever the order of requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import blocktrain as bt
from blocktrain.cache.encoding import Encoding, EncodingKind
from blocktrain.cache.prefix_cache import MakeStore, PrefixCache
from blocktrain.cache.slot_ledger import Ledger
from blocktrain.cache.store import FileStore, MemoryStore, RowLayout
from blocktrain.chain.block import Partition
from blocktrain.chain.boundary import BoundaryError, BoundaryRunner
from blocktrain.chain.cost import layer_costs
from blocktrain.errors import StorageError
from blocktrain.memory.flops import count_flops

CPU = torch.device("cpu")
KEY = {"rows": "first"}
SLOTS = 12
TOP = 5  # boundary of the head: embedding, four layers, head


def in_memory(_name: str, slots: int, layout: RowLayout) -> MemoryStore:
    return MemoryStore(slots, layout, device=CPU)


def in_files(folder: Path) -> MakeStore:
    return lambda name, slots, layout: FileStore(folder / name, slots, layout)


@dataclass
class Bench:
    """A model, its inputs for every slot, and a cache."""

    make_store: MakeStore = in_memory
    boundaries: Sequence[int] | None = None
    kind: EncodingKind = "compute"
    parts: Partition = field(init=False)
    inputs: dict[str, Tensor] = field(init=False)
    runner: BoundaryRunner = field(init=False)
    cache: PrefixCache = field(init=False)

    def __post_init__(self) -> None:
        self.parts, self.inputs = self.material()
        self.parts.model.eval()
        self.runner = BoundaryRunner(self.parts.chain)
        self.cache = self.new_cache()

    def material(self) -> tuple[Partition, dict[str, Tensor]]:
        config = GPT2Config(
            n_layer=4, n_embd=16, n_head=2, vocab_size=64, n_positions=8, bos_token_id=0, eos_token_id=0
        )
        return bt.partition(GPT2LMHeadModel(config), num_blocks=3), {"input_ids": torch.randint(0, 64, (SLOTS, 8))}

    def new_cache(self) -> PrefixCache:
        return PrefixCache(
            self.runner,
            num_slots=SLOTS,
            encoding=Encoding(self.kind),
            make_store=self.make_store,
            boundaries=self.boundaries,
        )

    def batch(self, slots: np.ndarray) -> dict[str, Any]:
        return {name: value[slots] for name, value in self.inputs.items()}

    def open(self, boundary: int, *, key: dict[str, Any] = KEY) -> None:
        self.cache.open(boundary, key=key, sample=self.batch(np.array([0])))

    def fetch(self, *slots: int) -> Tensor:
        return self.cache.fetch(np.array(slots), self.batch(np.array(slots)))

    def fetch_all(self) -> None:
        """Fetch every slot once, four at a time, in random order, and compare with the model."""
        for step in np.random.default_rng(0).permutation(SLOTS).reshape(-1, 4):
            assert torch.equal(self.fetch(*step), self.expected(*step))

    def expected(self, *slots: int, boundary: int | None = None) -> Tensor:
        """What the model computes for these slots, from the inputs."""
        at = boundary or self.cache.boundary
        return self.runner.states(self.batch(np.array(slots)), [at])[at]

    def train(self, *layers: int) -> None:
        """Change the weights that some layers own (not a tied head's, which are the embedding's)."""
        with torch.no_grad():
            for layer in layers:
                for parameter in self.parts.chain.owned[layer].values():
                    parameter.add_(0.01 * torch.randn_like(parameter))

    def flops(self, start: int, end: int, *, rows: int = SLOTS) -> int:
        costs = layer_costs(self.parts.chain, self.batch(np.arange(rows)))
        return sum(cost.forward_flops for cost in costs[start:end])


@dataclass
class Images(Bench):
    """ResNet-8: stem, three units, head; every boundary has another shape."""

    def material(self) -> tuple[Partition, dict[str, Tensor]]:
        parts = bt.partition(bt.resnet(8), num_blocks=3)
        return parts, {"pixel_values": torch.randn(SLOTS, 3, 16, 16)}


@pytest.fixture(params=["memory", "file"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    return in_memory if request.param == "memory" else in_files(tmp_path / "prefix")


# -- a visit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boundary", [1, 3, TOP])
def test_the_first_pass_stores_what_it_computes_and_the_second_reads_it(make_store: MakeStore, boundary: int):
    bench = Bench(make_store)
    bench.open(boundary)
    bench.fetch_all()
    seen = bench.cache.statistics
    assert (seen.requested, seen.hits, seen.computed, seen.layers_run) == (SLOTS, 0, SLOTS, {(0, boundary): SLOTS})
    assert seen.bytes_stored == SLOTS * 8 * 16 * 4
    assert seen.fill_seconds > 0
    filled = seen.fill_seconds

    assert count_flops(bench.fetch_all) == bench.flops(0, boundary)  # of the expected values alone
    assert (seen.requested, seen.hits, seen.computed) == (2 * SLOTS, SLOTS, SLOTS)
    assert seen.fill_seconds == filled
    assert seen.wait_seconds > 0
    bench.cache.close()


def test_hits_and_misses_in_one_batch_in_any_order(make_store: MakeStore):
    for stored in itertools.islice(itertools.permutations([7, 2, 11, 5]), 0, 24, 5):
        bench = Bench(make_store)
        bench.open(3)
        bench.fetch(stored[0], stored[2])
        for asked in ([7, 2, 11, 5], [5, 11, 7, 2]):
            assert torch.equal(bench.fetch(*asked), bench.expected(*asked))
        seen = bench.cache.statistics
        assert (seen.requested, seen.hits, seen.computed) == (10, 6, 4)
        bench.cache.close()


def test_a_slot_requested_twice_in_one_batch(make_store: MakeStore):
    bench = Bench(make_store)
    bench.open(3)
    for asked in ([4, 4, 1], [1, 8, 1, 4]):
        assert torch.equal(bench.fetch(*asked), bench.expected(*asked))
    bench.cache.close()


def test_every_fetch_is_a_hit_after_filling_ahead(make_store: MakeStore):
    bench = Bench(make_store)
    bench.open(3)
    assert bench.cache.missing(np.arange(SLOTS)).tolist() == list(range(SLOTS))
    for slots in np.array_split(np.arange(SLOTS), [5, 10]):
        bench.cache.fill(slots, bench.batch(slots))
    assert bench.cache.missing(np.arange(SLOTS)).tolist() == []
    bench.fetch_all()
    seen = bench.cache.statistics
    assert (seen.requested, seen.hits, seen.computed, seen.layers_run) == (SLOTS, SLOTS, SLOTS, {(0, 3): SLOTS})
    bench.cache.close()


def test_a_fetch_returns_its_rows_whatever_was_prefetched(make_store: MakeStore):
    bench = Bench(make_store)
    bench.open(3)
    bench.cache.prefetch(np.array([1, 2]))  # nothing there yet: nothing is read
    bench.fetch_all()
    for asked, prefetched in (([3, 1], [3, 1]), ([3, 1], [1, 3]), ([0, 9], [0, 9]), ([0, 9], [5, 6])):
        bench.cache.prefetch(np.array(prefetched))
        assert torch.equal(bench.fetch(*asked), bench.expected(*asked))
    bench.cache.prefetch(np.array([3, 1]))
    bench.cache.close()


def test_a_prefetch_at_the_end_of_a_visit_is_not_used_in_the_next_visit(make_store: MakeStore):
    bench = Bench(make_store, boundaries=(2, 4))
    bench.open(4)
    bench.fetch_all()
    bench.cache.prefetch(np.array([3, 1]))
    bench.open(2)
    assert torch.equal(bench.fetch(3, 1), bench.expected(3, 1, boundary=2))
    assert bench.cache.statistics.hits == 2
    bench.cache.close()


def test_a_batch_may_contain_values_that_are_not_tensors():
    bench = Bench()
    bench.open(3)
    bench.fetch(1)
    batch = {**bench.batch(np.array([1, 2])), "use_cache": False}
    assert torch.equal(bench.cache.fetch(np.array([1, 2]), batch), bench.expected(1, 2))


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_lossy_store_returns_equal_rows_the_first_time_and_later(make_store: MakeStore, kind: EncodingKind):
    bench = Bench(make_store, kind=kind)
    bench.open(3)
    first, second = bench.fetch(3, 1, 8), bench.fetch(3, 1, 8)
    assert torch.equal(first, second)
    assert first.dtype == torch.float32
    exact = bench.expected(3, 1, 8)
    assert not torch.equal(first, exact)
    torch.testing.assert_close(first, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))
    seen = bench.cache.statistics
    assert seen.encoding_error == pytest.approx(float((first - exact).norm() / exact.norm()), rel=1e-3)
    assert seen.bytes_stored == SLOTS * 8 * (16 * 2 if kind == "bf16" else 16 + 4)
    bench.cache.close()


def test_a_model_in_bf16_is_stored_in_bf16(make_store: MakeStore):
    bench = Bench(make_store)
    bench.parts.model.to(torch.bfloat16)
    bench.open(3)
    bench.fetch_all()
    assert bench.fetch(1).dtype == torch.bfloat16
    assert bench.cache.statistics.bytes_stored == SLOTS * 8 * 16 * 2
    bench.cache.close()


# -- the next visit ---------------------------------------------------------------------------------------------------


def test_advancing_costs_the_layers_in_between_and_nothing_else(make_store: MakeStore):
    bench = Bench(make_store)
    slots = np.arange(SLOTS)
    before = 0
    for boundary in (1, 3, TOP):
        bench.train(*range(before, boundary))  # the block just retired
        bench.open(boundary)
        assert bench.cache.rows_by_source(boundary, key=KEY) == {before: SLOTS}
        assert count_flops(lambda: bench.cache.fill(slots, bench.batch(slots))) == bench.flops(before, boundary)
        assert bench.cache.statistics.layers_run == {(before, boundary): SLOTS}
        assert bench.cache.statistics.stale == 0
        bench.fetch_all()
        assert bench.cache.statistics.bytes_stored == SLOTS * 8 * 16 * 4  # in place
        before = boundary
    bench.cache.close()


@pytest.mark.parametrize("boundaries", [(3,), (1, 3), (1, 2, 3, 4, TOP)])
def test_an_ascending_sweep_costs_one_forward_pass_over_the_subset(make_store: MakeStore, boundaries: tuple[int, ...]):
    """Closed form: the layers below the last block's boundary, once for each row, whatever the number of visits."""
    bench = Bench(make_store)
    total = 0
    for boundary in boundaries:
        bench.open(boundary)
        for slots in np.arange(SLOTS).reshape(3, 4):
            total += count_flops(lambda slots=slots: bench.fetch(*slots))
        total += count_flops(lambda: bench.fetch(3, 1, 7))  # used again: free
        bench.train(*range(boundary, TOP))  # the block just retired, and what comes after it
    assert total == bench.flops(0, boundaries[-1])
    bench.cache.close()


@pytest.mark.parametrize("boundaries", [(3,), (1, 3), (1, 2, 4, TOP)])
def test_a_descending_sweep_costs_one_forward_pass_over_the_subset(make_store: MakeStore, boundaries: tuple[int, ...]):
    bench = Bench(make_store, boundaries=boundaries)
    total = 0
    for boundary in reversed(boundaries):
        bench.open(boundary)
        for slots in np.arange(SLOTS).reshape(3, 4):
            total += count_flops(lambda slots=slots: bench.fetch(*slots))
        bench.fetch_all()
        assert bench.cache.statistics.hits == (SLOTS if boundary == boundaries[-1] else 2 * SLOTS)
        bench.train(*range(boundary, TOP + 1))  # above its own boundary: those below stay as they are
    assert total == bench.flops(0, boundaries[-1])
    assert bench.cache.statistics.bytes_stored == len(boundaries) * SLOTS * 8 * 16 * 4
    bench.cache.close()


def test_a_row_that_visits_did_not_reach_is_computed_from_its_last_boundary(make_store: MakeStore):
    """Visits that do not reach all rows leave them at three boundaries."""
    bench = Bench(make_store)
    bench.open(1)
    bench.fetch(0, 1, 2, 3, 4, 5)
    bench.open(2)
    bench.fetch(0, 1, 2)
    bench.open(4)
    assert bench.cache.rows_by_source(4, key=KEY) == {0: 6, 1: 3, 2: 3}
    assert torch.equal(bench.fetch(6, 5, 0, 2, 11), bench.expected(6, 5, 0, 2, 11))
    assert bench.cache.statistics.layers_run == {(0, 4): 2, (1, 4): 2, (2, 4): 2}  # row 5 in two copies
    assert (bench.cache.statistics.hits, bench.cache.statistics.computed) == (0, 5)
    bench.cache.close()


def test_descending_a_row_missing_at_the_lower_boundary_is_computed_from_below(make_store: MakeStore):
    bench = Bench(make_store, boundaries=(1, 3))
    bench.open(3)
    bench.fetch(0, 1)
    bench.open(1)
    assert torch.equal(bench.fetch(1, 5), bench.expected(1, 5, boundary=1))
    assert bench.cache.statistics.layers_run == {(0, 1): 2}  # row 5 in two copies, and so below
    bench.open(3)
    assert torch.equal(bench.fetch(5, 0, 7), bench.expected(5, 0, 7, boundary=3))
    assert bench.cache.statistics.layers_run == {(1, 3): 2, (0, 3): 2}
    bench.cache.close()


@pytest.mark.parametrize("boundaries", [None, (1, 3)], ids=["moved up", "kept"])
def test_rows_whose_layers_have_changed_are_computed_again(make_store: MakeStore, boundaries: tuple[int, ...] | None):
    bench = Bench(make_store, boundaries=boundaries)
    bench.open(3)
    bench.fetch_all()
    bench.train(4)
    bench.open(3)
    assert bench.cache.statistics.stale == 0
    bench.train(2)
    assert bench.cache.rows_by_source(3, key=KEY) == ({0: SLOTS} if boundaries is None else {1: SLOTS})  # and not 3
    bench.open(3)
    assert bench.cache.statistics.stale == SLOTS
    bench.fetch_all()
    assert bench.cache.statistics.layers_run == {(0 if boundaries is None else 1, 3): SLOTS}
    bench.cache.close()


def test_a_change_of_batchnorm_statistics_makes_rows_stale():
    bench = Images()
    bench.open(2)
    bench.fetch_all()
    dict(bench.parts.model.named_buffers())["layer1.0.bn1.running_var"].mul_(2)
    bench.open(2)
    assert bench.cache.statistics.stale == SLOTS
    bench.fetch_all()


def test_going_down_with_one_store_computes_from_below(make_store: MakeStore):
    """The order of a shuffled sweep."""
    bench = Bench(make_store)
    bench.open(4)
    bench.fetch_all()
    bench.open(2)
    assert bench.cache.rows_by_source(2, key=KEY) == {0: SLOTS}
    bench.fetch_all()
    assert bench.cache.statistics.layers_run == {(0, 2): SLOTS}
    bench.open(4)
    bench.fetch_all()
    assert bench.cache.statistics.layers_run == {(2, 4): SLOTS}
    bench.cache.close()


def test_other_rows_empty_the_cache(make_store: MakeStore):
    bench = Bench(make_store)
    bench.open(3)
    bench.fetch_all()
    assert bench.cache.rows_by_source(3, key={"rows": "second"}) == {0: SLOTS}
    bench.inputs["input_ids"] = bench.inputs["input_ids"].flip(0)
    bench.open(3, key={"rows": "second"})
    bench.fetch_all()
    assert bench.cache.statistics.hits == 0
    bench.cache.close()


# -- shapes that differ by boundary -----------------------------------------------------------------------------------


@pytest.mark.parametrize("boundaries", [None, (1, 2, 3, 4)], ids=["moved up", "kept"])
def test_resnet(make_store: MakeStore, boundaries: tuple[int, ...] | None):
    shapes = {1: (16, 16, 16), 2: (16, 16, 16), 3: (32, 8, 8), 4: (64,)}
    size = {boundary: 4 * SLOTS * int(np.prod(shape)) for boundary, shape in shapes.items()}
    bench = Images(make_store, boundaries=boundaries)
    total = 0
    for boundary in (1, 2, 3, 4) if boundaries is None else (4, 3, 2, 1):
        bench.open(boundary)
        total += count_flops(lambda: bench.fetch(*range(SLOTS)))
        bench.fetch_all()
        assert bench.fetch(0).shape == (1, *shapes[boundary])
        if boundaries is not None:
            assert bench.cache.statistics.bytes_stored == sum(size.values())
    assert total == bench.flops(0, 4)
    bench.cache.close()


def test_rows_that_moved_to_another_shape_leave_no_store_behind(tmp_path: Path):
    """The store of boundary 2 once stayed for the whole sweep, in addition to those of boundaries 3 and 4."""
    bench = Images(in_files(tmp_path))
    stored: dict[int, list[str]] = {}
    for boundary in (2, 3, 4):
        bench.open(boundary)
        bench.fetch_all()
        stored[boundary] = sorted(str(path.parent.name) for path in tmp_path.glob("*/data.rows"))
    assert stored == {2: ["rows-16x16x16"], 3: ["rows-16x16x16", "rows-32x8x8"], 4: ["rows-32x8x8", "rows-64"]}
    bench.open(4)
    assert bench.cache.statistics.bytes_stored == SLOTS * 64 * 4
    bench.open(3)  # down again: rows of higher boundaries are of no use
    assert [path.parent.name for path in tmp_path.glob("*/data.rows")] == ["rows-32x8x8"]
    bench.cache.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# -- on disk ----------------------------------------------------------------------------------------------------------


def damage(path: Path, slot: int) -> None:
    data = bytearray(path.read_bytes())
    data[slot * (len(data) // SLOTS) + 3] ^= 4
    path.write_bytes(data)


def test_files_are_found_again_by_another_process_and_what_is_damaged_is_not_used(tmp_path: Path):
    bench = Bench(in_files(tmp_path))
    bench.open(3)
    bench.fetch(0, 1, 2, 3, 4)
    bench.cache.close(keep_files=True)
    damage(tmp_path / "rows-8x16" / "data.rows", 3)

    bench.cache = bench.new_cache()
    bench.open(3)
    assert bench.cache.statistics.damaged == 1
    assert torch.equal(bench.fetch(3, 0, 4, 9), bench.expected(3, 0, 4, 9))
    assert (bench.cache.statistics.hits, bench.cache.statistics.computed) == (2, 2)
    bench.cache.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("change", ["rows", "encoding", "weights", "stored boundaries"])
def test_files_with_another_key_are_not_used(tmp_path: Path, change: str):
    bench = Bench(in_files(tmp_path))
    bench.open(3)
    bench.fetch_all()
    bench.cache.close(keep_files=True)
    if change == "encoding":
        bench.kind = "bf16"
    if change == "weights":
        bench.train(1)
    if change == "stored boundaries":
        bench.boundaries = (1, 3)
    bench.cache = bench.new_cache()
    bench.open(3, key={"rows": "second"} if change == "rows" else KEY)
    assert bench.cache.missing(np.arange(SLOTS)).tolist() == list(range(SLOTS))
    assert bench.cache.statistics.stale == (SLOTS if change == "weights" else 0)
    bench.cache.close()


def test_a_ledger_that_finds_no_room_leaves_no_store_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_args: Any) -> None:
        raise StorageError("no room left for the ledger")

    monkeypatch.setattr(Ledger, "_save", full)
    bench = Bench(in_files(tmp_path))
    with pytest.raises(StorageError):
        bench.open(3)
    assert not list(tmp_path.rglob("*.rows"))
    bench.cache.close()


# -- what it refuses --------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_run_from_a_boundary_is_refused_before_a_store_is_made(monkeypatch: pytest.MonkeyPatch):
    def no_store(*_args: Any) -> MemoryStore:
        raise AssertionError("a store was made")

    bench = Bench(no_store)
    plain = bench.parts.model.forward
    monkeypatch.setattr(bench.parts.model, "forward", lambda **batch: _with_embeddings(bench, plain, batch))
    with pytest.raises(BoundaryError):
        bench.open(3)


def _with_embeddings(bench: Bench, plain: Callable[..., Any], batch: dict[str, Any]) -> Any:
    """The output plus the output of the first layer: a skip connection across every boundary."""
    kept: list[Tensor] = []

    def keep(_module: Any, _args: Any, output: Any) -> None:
        kept.append(output if isinstance(output, Tensor) else output[0])

    with next(iter(bench.parts.chain.layers[1].modules.values())).register_forward_hook(keep):
        output = plain(**batch)
    output.logits = output.logits + kept[0].mean(-1, keepdim=True)
    return output

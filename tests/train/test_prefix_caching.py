"""A run with a prefix cache is the run without one: the same losses, the same weights, fewer FLOPs."""

from __future__ import annotations

import io
import itertools
import json
import logging
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import blocktrain as bt
from blocktrain import probe
from blocktrain.cache.cost_model import StoreChoice
from blocktrain.cache.slot_ledger import Fingerprints
from blocktrain.probe import Medium
from blocktrain.records.run_records import CacheUse, Record
from blocktrain.train.checkpoint import checkpoints
from blocktrain.train.context import build
from blocktrain.train.techniques import prefix_caching
from blocktrain.train.toml_dataclasses import override

from ..run_events import Crash, crash_at, events_of

Run = Callable[..., Path]

# 85 training rows, 16 of them a sweep, 4 steps a pass, two passes a visit, two sweeps of three visits: 48 steps.
# Boundaries below transformer layers 1 and 2, so that no prefix is free.
SMALL = [
    "sampling.scope=sweep",
    "sampling.rate=0.2",
    "schedule.visit=2 epochs",
    "schedule.sweeps=2",
    'blocks.patterns=[["embedding", "transformer.h.0"], ["transformer.h.1"], ["transformer.h.2", "head"]]',
    "model.config.n_layer=3",
    "evaluation.every=1000 steps",
    "checkpoint.every=1000 steps",
]
ROWS, PASS = 16, 4  # rows of a subset, steps of a pass over it
ROW_BYTES = 16 * 16 * 4  # tokens x width x fp32


def curve(run: Path) -> list[tuple[float, float]]:
    return [(event["loss"], event["grad_norm"]) for event in events_of(run, "step")]


def learned(run: Path) -> tuple[list[tuple[float, float]], float, dict[str, str]]:
    """Loss and gradient norm of every step, the last evaluation, and the checksums of weights, moments and buffers."""
    manifest = json.loads((checkpoints(run / "checkpoints")[-1] / "checkpoint.json").read_text())
    files = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    return curve(run), events_of(run, "evaluation")[-1]["loss"], files


def cost_of_layers(run: Path) -> list[int]:
    """FLOPs of each layer's forward pass over the rows of a step."""
    return events_of(run, "cost")[0]["flops"]["forward_layers"]


def stored_files(run: Path) -> list[Path]:
    return [path for path in (run / "prefix").rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def small_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "corpus.txt"
    path.write_text(Path(json.decoder.__file__).read_text()[:1700])
    return path


@pytest.fixture(scope="module")
def train(tiny, small_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`train("prefix.store=host", ...)`: the folder of the finished run; one run for the same overrides."""
    finished: dict[tuple[str, ...], Path] = {}

    def run(*overrides: str) -> Path:
        if overrides not in finished:
            finished[overrides] = tmp_path_factory.mktemp("run") / "out"
            bt.run(tiny(f"text.source={small_text}", *SMALL, *overrides), finished[overrides])
        return finished[overrides]

    return run


@pytest.fixture
def config(tiny, small_text: Path) -> Callable[..., bt.RunConfig]:
    return lambda *overrides: tiny(f"text.source={small_text}", *SMALL, *overrides)


# -- the same run -----------------------------------------------------------------------------------------------------

# Every two of (store, fill), (store, order), (fill, order), (order, micro) meet.
PAIRS = [
    ("host", "lazy", "ascending", None),
    ("file", "ahead", "ascending", 2),
    ("auto", "lazy", "ascending", 2),
    ("host", "ahead", "descending", 2),
    ("file", "lazy", "descending", None),
    ("auto", "ahead", "descending", None),
    ("host", "lazy", "shuffled", 2),
    ("file", "ahead", "shuffled", None),
    ("device", "lazy", "shuffled", None),
]


def shape(order: str, micro: int | None) -> list[str]:
    return [f"schedule.order={order}", *([] if micro is None else [f"batch.micro_rows={micro}"])]


@pytest.mark.parametrize(("store", "fill", "order", "micro"), PAIRS)
def test_the_same_losses_and_weights_bit_for_bit(train: Run, store: str, fill: str, order: str, micro: int | None):
    """Dropout acts in the active block: it must be drawn as without a cache."""
    plain = train("prefix.store=off", *shape(order, micro))
    cached = train(f"prefix.store={store}", f"prefix.fill={fill}", *shape(order, micro))
    assert learned(cached) == learned(plain)
    assert len(curve(plain)) == 6 * 2 * PASS
    assert not events_of(plain, "cache") + events_of(plain, "cached")
    assert len(events_of(cached, "cache")) == 4  # block 0 has no prefix
    assert stored_files(cached) == []
    if store != "auto":
        assert [event["place"] for event in events_of(cached, "cached")] == [store] * 4


@pytest.mark.parametrize(
    ("precision", "order", "fill"),
    [("fp32", "ascending", "lazy"), pytest.param("int8", "descending", "ahead", marks=pytest.mark.slow)],
)
def test_frozen_layers_in_int8(train: Run, precision: str, order: str, fill: str):
    """Stored rows were computed in other batches than those of a step."""
    int8 = ["memory.frozen_compute=int8", f"precision={precision}", f"schedule.order={order}"]
    plain = train("prefix.store=off", *int8)
    cached = train("prefix.store=host", f"prefix.fill={fill}", "prefix.fill_rows=3", *int8)
    assert learned(cached) == learned(plain)
    assert [event["place"] for event in events_of(cached, "cached")] == ["host"] * 4
    exact = train("prefix.store=off", f"precision={precision}", f"schedule.order={order}")
    assert curve(plain) != curve(exact)


def test_without_dropout_and_with_another_seed(train: Run):
    still = [f"model.config.{name}=0.0" for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop")]
    plain, cached = (train(f"prefix.store={store}", "seed=3", *still) for store in ("off", "host"))
    assert learned(cached) == learned(plain)
    assert curve(plain) != curve(train("prefix.store=off", *shape("ascending", None)))


def test_a_fresh_subset_each_visit(train: Run):
    scope = ["sampling.scope=visit", "schedule.visit=3 epochs"]
    plain, cached = (train(f"prefix.store={store}", *scope) for store in ("off", "host"))
    assert learned(cached) == learned(plain)
    for event in events_of(cached, "cached"):
        assert (event["rows"], event["hits"], event["computed"]) == (3 * ROWS, 2 * ROWS, ROWS)


def test_an_unreachable_part_of_the_subset_and_a_visit_that_ends_early(train: Run):
    """Half a pass a visit: the rows of the next visits are stored at no level, one level or two."""
    short = ["schedule.visit=2 steps"]
    plain, cached = (train(f"prefix.store={store}", *short) for store in ("off", "host"))
    assert learned(cached) == learned(plain)


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_blocks_that_meet_inside_of_a_layer(train: Run, order: str):
    """What is stored is what goes into the layer: its lower part, of the block below, runs as the upper one does."""
    shared = ["blocks.patterns=none", "blocks.pieces=modules", "blocks.count=3", f"schedule.order={order}"]
    plain, cached = (train(f"prefix.store={store}", *shared) for store in ("off", "host"))
    assert learned(cached) == learned(plain)
    assert len(events_of(cached, "cached")) == 4
    assert events_of(plain, "run")[0]["blocks"][1]["first"] == "transformer.h.0.attn.c_proj"


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 0.004), ("int8", 0.01)])
def test_a_lossy_store_says_what_it_loses(train: Run, dtype: str, most: float):
    plain, cached = (
        train("prefix.store=off", *shape("ascending", None)),
        train("prefix.store=host", f"prefix.dtype={dtype}"),
    )
    assert all(0 < event["encoding_error"] < most for event in events_of(cached, "cached"))
    one, other = ([loss for loss, _ in curve(run)] for run in (plain, cached))
    assert one != other
    np.testing.assert_allclose(one, other, rtol=0.02)


# -- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", ["lazy", "ahead"])
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_a_sweep_costs_one_forward_pass_over_the_subset_instead_of_every_prefix(train: Run, order: str, fill: str):
    """In closed form: F_k of the prefix of block k is not run in its 2 passes; once a sweep the largest of them is."""
    run = train("prefix.store=host", f"prefix.fill={fill}", f"schedule.order={order}")
    (cost,), layers = events_of(run, "cost"), cost_of_layers(run)
    prefix = {1: sum(layers[:2]) * PASS, 2: sum(layers[:3]) * PASS}  # of a pass over the subset
    saved = 2 * (2 * prefix[1] + 2 * prefix[2] - prefix[2])
    (end,) = events_of(run, "end")
    assert end["flops"] == 2 * 2 * PASS * sum(cost["flops"]["blocks"]) - saved
    cached = events_of(run, "cached")
    assert sum(event["flops_saved"] for event in cached) == saved
    for event in cached:
        filled = fill == "ahead" or (order == "descending" and event["block"] == 1)
        assert event["rows"] == 2 * ROWS
        assert event["hits"] == (2 * ROWS if filled else ROWS)
        assert event["computed"] == (0 if order == "descending" and event["block"] == 1 else ROWS)
        assert event["stale"] == event["damaged"] == 0
        assert event["bytes"] == ROWS * ROW_BYTES * (2 if order == "descending" else 1)
        assert event["encoding_error"] == 0


# -- what is decided, and why -----------------------------------------------------------------------------------------


def test_auto_says_why_rows_that_are_used_once_are_not_stored(train: Run):
    scope = ["sampling.scope=run", "sampling.rate=1.0", "schedule.visit=4 steps"]
    run = train(*scope)
    records = events_of(run, "cache")
    assert [(event["place"], event["visit"], event["level"]) for event in records] == [
        (None, 1, 2),
        (None, 2, 3),
        (None, 4, 2),
        (None, 5, 3),
    ]
    assert all("cannot pay: each row is used 0.19 times in the visit" in event["reason"] for event in records)
    assert events_of(run, "cached") == []
    assert learned(run) == learned(train("prefix.store=off", *scope))
    assert not (run / "prefix").exists()


def test_auto_gives_seconds_and_an_embedding_alone_never_pays(train: Run):
    """A prefix of the embedding alone costs no FLOPs: it was timed at one FLOP a second, and a cache seemed to pay."""
    patterns = 'blocks.patterns=[["embedding"], ["transformer.h.[01]"], ["transformer.h.2", "head"]]'
    for order in ("ascending", "descending"):
        run = train(patterns, f"schedule.order={order}", "schedule.visit=6 epochs", "schedule.sweeps=1")
        reasons = {event["level"]: (event["place"], event["reason"]) for event in events_of(run, "cache")}
        assert reasons[1] == (None, "cannot pay: the prefix costs no FLOPs")
        assert reasons[3][0] in ("host", "file")  # the speeds are measured
        assert "s of filling and reading instead of" in reasons[3][1]
        (cached,) = events_of(run, "cached")
        assert cached["bytes"] == ROWS * ROW_BYTES  # no room for the boundary that never pays


def test_off_says_nothing_and_named_stores_measure_nothing(train: Run, config, tmp_path: Path, monkeypatch):
    def measured(*_args: Any, **_keywords: Any) -> None:
        raise AssertionError("bandwidth was measured")

    monkeypatch.setattr(prefix_caching, "measure_bandwidths", measured)
    bt.run(config("prefix.store=off", "blocks.frozen_dropout=true", "schedule.sweeps=1"), tmp_path / "off")
    assert events_of(tmp_path / "off", "cache") == []
    bt.run(config("prefix.store=host", "schedule.sweeps=1"), tmp_path / "host")
    assert [event["place"] for event in events_of(tmp_path / "host", "cache")] == ["host", "host"]


def test_a_visit_s_start_reads_the_weights_below_it_once(config, tmp_path: Path, monkeypatch):
    """Deciding and opening both want their fingerprints; of a large model these take many seconds."""
    read: list[str] = []
    real = Fingerprints._hash_layer
    monkeypatch.setattr(
        Fingerprints, "_hash_layer", lambda self, layer: (read.append(layer.name), real(self, layer))[1]
    )
    bt.run(config("prefix.store=host", "schedule.sweeps=1", "schedule.visit=1 epochs"), tmp_path / "run")
    below = ["embedding", "transformer.h.0", "transformer.h.1"]
    assert read == [*below[:2], *below]  # of the second visit, of the third


def test_dropout_in_frozen_layers_is_refused_with_the_reason(train: Run):
    plain, refused = (train(f"prefix.store={store}", "blocks.frozen_dropout=true") for store in ("off", "host"))
    reasons = {(event["place"], event["reason"]) for event in events_of(refused, "cache")}
    assert reasons == {
        (None, "refused: dropout acts in frozen layers (blocks.frozen_dropout), so the prefix differs each time")
    }
    assert learned(refused) == learned(plain)


def test_another_place_in_the_middle_of_a_sweep(train: Run, config, tmp_path: Path, monkeypatch):
    """The rows of the old place are given up; once they stayed there under the new place's name."""
    places: Iterator[Medium] = itertools.cycle(("file", "host"))
    monkeypatch.setattr(prefix_caching, "choose", lambda *_: StoreChoice(place=next(places), reason="by turns"))
    files: list[bool] = []

    def look(record: Record) -> None:
        if isinstance(record, CacheUse):
            files.append(bool(stored_files(tmp_path / "run")))

    bt.run(config("prefix.store=auto"), tmp_path / "run", listeners=[look])
    assert files == [True, False, True, False]
    assert [event["place"] for event in events_of(tmp_path / "run", "cached")] == ["file", "host", "file", "host"]
    assert learned(tmp_path / "run") == learned(train("prefix.store=off", *shape("ascending", None)))


# -- interrupted ------------------------------------------------------------------------------------------------------


def crashed(config: bt.RunConfig, folder: Path, step: int) -> None:
    with pytest.raises(Crash):
        bt.run(config, folder, listeners=[crash_at(step)])
    assert stored_files(folder)


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("place", [(1, 6), (2, 2)], ids=["second visit, second pass", "other visit, first pass"])
def test_a_run_resumed_in_mid_visit_finds_what_it_had_stored(
    train: Run, config, tmp_path: Path, order: str, place: tuple[int, int]
):
    visit, at = place if order == "ascending" else (2 - place[0], place[1])
    store = ["prefix.store=file", f"schedule.order={order}", "checkpoint.every=1 steps", "schedule.sweeps=1"]
    crashed(config(*store), tmp_path / "run", visit * 2 * PASS + at)
    bt.resume(tmp_path / "run")
    assert learned(tmp_path / "run") == learned(train("prefix.store=off", "schedule.sweeps=1", *shape(order, None)))
    assert stored_files(tmp_path / "run") == []

    # The crash came after the rows of `at` steps were stored, but before the checkpoint of the last of them: those four
    # were found. The record is of both sessions.
    (record,) = [event for event in events_of(tmp_path / "run", "cached") if event["visit"] == visit]
    stored_before = order == "descending" and visit == 1
    assert record["rows"] == 4 * 2 * PASS
    assert record["computed"] == (0 if stored_before else ROWS if at > PASS else ROWS - 4)
    assert record["hits"] == record["rows"] - record["computed"]
    assert record["stale"] == record["damaged"] == 0


def test_a_run_resumed_after_a_visit_s_last_step_still_tells_what_the_cache_did(train: Run, config, tmp_path: Path):
    """Its checkpoint holds a visit that is over and has no record yet; the record was once missing."""

    def listen(record: Record) -> None:
        if isinstance(record, CacheUse) and record.visit == 1:
            raise Crash

    settings = config("prefix.store=file", "checkpoint.every=8 steps", "schedule.sweeps=1")
    with pytest.raises(Crash):
        bt.run(settings, tmp_path / "run", listeners=[listen])
    bt.resume(tmp_path / "run")
    there, never_interrupted = (
        [{name: event[name] for name in ("visit", "place", "rows", "hits", "computed", "bytes", "flops_saved")}
         for event in events_of(run, "cached")]
        for run in (tmp_path / "run", train("prefix.store=file", "schedule.sweeps=1"))
    )  # fmt: skip
    assert there == never_interrupted
    assert len(there) == 2


def test_rows_damaged_while_the_run_was_down_are_computed_again(train: Run, config, tmp_path: Path):
    once = ["schedule.sweeps=1"]
    crashed(config("prefix.store=file", "checkpoint.every=1 steps", *once), tmp_path / "run", 2 * PASS + 6)
    (rows,) = (tmp_path / "run" / "prefix").rglob("data.rows")
    data = bytearray(rows.read_bytes())
    for slot in (3, 11):
        data[slot * ROW_BYTES + 100] ^= 1
    rows.write_bytes(data)
    bt.resume(tmp_path / "run")
    record = events_of(tmp_path / "run", "cached")[0]
    assert (record["visit"], record["damaged"]) == (1, 2)
    assert ROWS <= record["computed"] <= ROWS + 2
    assert record["hits"] == record["rows"] - record["computed"]
    assert learned(tmp_path / "run") == learned(train("prefix.store=off", *once, *shape("ascending", None)))


def test_rows_of_a_visit_that_the_checkpoint_has_not_seen_are_stale(train: Run, config, tmp_path: Path):
    """Resumed in the visit before: what was advanced through the block just retired must not be taken for its input."""
    once = ["schedule.sweeps=1"]
    crashed(config("prefix.store=file", "checkpoint.every=11 steps", *once), tmp_path / "run", 4 * PASS + 3)
    bt.resume(tmp_path / "run")
    record = events_of(tmp_path / "run", "cached")[0]
    assert (record["visit"], record["stale"]) == (1, 12)  # of three steps at level 3; four rows still are at level 2
    assert record["computed"] == 12 + 12  # before the checkpoint, and again
    assert learned(tmp_path / "run") == learned(train("prefix.store=off", *once, *shape("ascending", None)))


def test_a_run_that_is_interrupted_twice_and_filled_ahead(train: Run, config, tmp_path: Path):
    settings = config("prefix.store=file", "prefix.fill=ahead", "checkpoint.every=3 steps", "schedule.sweeps=1")
    crashed(settings, tmp_path / "run", 2 * PASS + 4)
    with pytest.raises(Crash):
        bt.resume(tmp_path / "run", listeners=[crash_at(5 * PASS)])
    bt.resume(tmp_path / "run")
    plain = train("prefix.store=off", "schedule.sweeps=1", *shape("ascending", None))
    assert learned(tmp_path / "run") == learned(plain)
    (record,) = [event for event in events_of(tmp_path / "run", "cached") if event["visit"] == 2]
    assert (record["computed"], record["hits"], record["rows"]) == (ROWS, 4 * 2 * PASS, 4 * 2 * PASS)
    assert stored_files(tmp_path / "run") == []


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
def test_a_lossy_store_in_memory_that_is_lost_changes_nothing(train: Run, config, tmp_path: Path, order: str):
    """A row that was advanced had been rounded at each boundary on its way; computed again, at the last one only."""
    lossy = ["prefix.store=host", "prefix.dtype=int8", "schedule.sweeps=1", *shape(order, None)]
    crashed_at = 4 * PASS + 3
    with pytest.raises(Crash):
        bt.run(config(*lossy, "checkpoint.every=9 steps"), tmp_path / "run", listeners=[crash_at(crashed_at)])
    bt.resume(tmp_path / "run")
    assert learned(tmp_path / "run") == learned(train(*lossy))


# -- no room ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def limit_files() -> Iterator[Callable[[int], None]]:
    """`limit_files(n)`: from now on no file of this process can grow beyond n bytes: a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Rows of 4 kB, 64 kB in all: more than any file of a checkpoint holds when there are no moments.
WIDE = ["text.row_tokens=64", "model.config.n_positions=64", "sampling.rate=0.8", "optimizer.name=SGD"]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("store", "reason"), [("file", "given up: with 16.0 KiB"), ("auto", "does not pay: host has")])
def test_room_is_left_for_two_checkpoints(  # noqa: PLR0917 - fixtures
    train: Run, config, tmp_path: Path, monkeypatch, store: str, reason: str
) -> None:
    """The cache used to take the last space of a disk, so that the next checkpoint failed."""
    parameters = sum(p.numel() for p in build(config(), tmp_path).model.parameters())
    room = 2 * 12 * parameters  # fp32 weights and two averages
    total, used, _ = shutil.disk_usage(tmp_path)

    def left(_: object) -> Any:
        return shutil._ntuple_diskusage(total, used, room - 1)  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setattr(shutil, "disk_usage", left)
    monkeypatch.setattr(probe, "available_memory_bytes", lambda: 0)
    bt.run(config(f"prefix.store={store}"), tmp_path / "run")
    decided = events_of(tmp_path / "run", "cache")
    assert {event["place"] for event in decided} == {None}
    assert decided[0]["reason"].startswith(reason)
    assert "file has room for 0 B" in decided[0]["reason"] or "next two checkpoints" in decided[0]["reason"]
    assert learned(tmp_path / "run") == learned(train("prefix.store=off"))


def test_a_disk_that_fills_up_in_mid_visit(train: Run, config, tmp_path: Path, limit_files, caplog):
    """One warning, no cache for the rest of the run, the same weights; FLOPs saved until then stay saved."""
    plain, cached = (train(f"prefix.store={store}", *WIDE) for store in ("off", "file"))

    def fill_the_disk(record: Record) -> None:
        if isinstance(record, CacheUse):  # of visit 1: the next one advances its rows
            limit_files(61_000)  # slots 14 and 15 of its file

    caplog.clear()
    bt.run(config("prefix.store=file", *WIDE), tmp_path / "run", listeners=[fill_the_disk])
    assert learned(tmp_path / "run") == learned(plain)
    (warning,) = warnings_in(caplog)
    assert warning.startswith("training goes on without a prefix cache: no room left while writing")
    places = [event["place"] for event in events_of(tmp_path / "run", "cache")]
    assert places == ["file", "file", None]  # visit 2 began with one; what happened then is said once
    later = events_of(tmp_path / "run", "cache")[-1]
    assert later["reason"].startswith("given up: no room left while writing")
    assert len(events_of(tmp_path / "run", "cached")) == 1
    assert stored_files(tmp_path / "run") == []

    # Each step of visit 2 until then saved what is below the boundary of visit 1: it was advanced from there.
    flops = [events_of(run, "end")[0]["flops"] for run in (cached, tmp_path / "run", plain)]
    (before,) = events_of(tmp_path / "run", "cached")
    steps, rest = divmod(flops[2] - flops[1] - before["flops_saved"], sum(cost_of_layers(plain)[:2]))
    assert (steps in (1, 2, 3), rest) == (True, 0)
    assert flops[0] < flops[1]


def test_a_disk_that_is_too_small_from_the_start(train: Run, config, tmp_path: Path, limit_files, caplog):
    plain = train("prefix.store=off", *WIDE)
    caplog.clear()
    limit_files(45_000)
    bt.run(config("prefix.store=file", *WIDE), tmp_path / "run")
    assert learned(tmp_path / "run") == learned(plain)
    assert len(warnings_in(caplog)) == 1
    records = events_of(tmp_path / "run", "cache")
    assert [event["place"] for event in records] == [None]  # said once, not at every visit
    assert records[0]["reason"].startswith("given up: no room left while writing")
    assert stored_files(tmp_path / "run") == []
    ends = [events_of(run, "end")[0]["flops"] for run in (plain, tmp_path / "run")]
    assert ends[0] == ends[1]


def test_auto_on_a_full_disk_still_has_the_host(train: Run, config, tmp_path: Path, limit_files, caplog):
    """Measuring the disk's bandwidth once ended the run."""
    caplog.clear()
    limit_files(100_000)
    bt.run(config("prefix.store=auto", "schedule.visit=6 epochs", "schedule.sweeps=1"), tmp_path / "run")
    assert warnings_in(caplog) == []
    assert [event["place"] for event in events_of(tmp_path / "run", "cache")] == ["host", "host"]


# -- images -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of ResNet-8 on 60 images of noise."""
    image = pytest.importorskip("PIL.Image", reason="needs pillow")
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for name, count in (("train", 60), ("test", 12)):
        rows = []
        for _ in range(count):
            file = io.BytesIO()
            image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(file, "PNG")
            rows.append({"bytes": file.getvalue(), "path": None})
        labels = (np.arange(count) % 4).tolist()
        pq.write_table(pa.table({"img": rows, "label": labels}), folder / f"{name}.parquet")
    return {
        "name": "pictures",
        "device": "cpu",
        "images": {"source": str(folder), "cache": str(folder / "cache")},
        "model": {"architecture": "resnet8"},
        "sampling": {"scope": "sweep", "rate": 0.4},
        "blocks": {"count": 3, "balance": "flops"},
        "schedule": {"visit": "3 epochs", "sweeps": 2},
        "optimizer": {"name": "SGD", "lr": 0.05, "options": {"momentum": 0.9}, "state": "host"},
        "batch": {"rows": 6},
        "evaluation": {"every": "1000 steps", "rows": 12, "batch_rows": 6},
        "checkpoint": {"every": "1000 steps"},
    }


@pytest.fixture(scope="module")
def train_on_pictures(pictures, tmp_path_factory: pytest.TempPathFactory) -> Run:
    finished: dict[tuple[str, ...], Path] = {}

    def run(*overrides: str) -> Path:
        if overrides not in finished:
            finished[overrides] = tmp_path_factory.mktemp("pictures") / "out"
            settings = override(json.loads(json.dumps(pictures)), overrides)
            bt.run(bt.RunConfig.from_mapping(settings), finished[overrides])
        return finished[overrides]

    return run


@pytest.mark.parametrize(
    ("variants", "store", "fill", "order"),
    [
        pytest.param(1, "host", "lazy", "ascending", marks=pytest.mark.slow),
        pytest.param(1, "file", "ahead", "descending", marks=pytest.mark.slow),
        (2, "file", "lazy", "ascending"),
        pytest.param(2, "host", "ahead", "descending", marks=pytest.mark.slow),
    ],
)
def test_resnet_with_augmentation_frozen_or_in_two_variants(
    train_on_pictures: Run, variants: int, store: str, fill: str, order: str
):
    """BatchNorm's statistics, augmented inputs, hidden states of another shape at every boundary: the same curve."""
    common = [f"sampling.variants={variants}", f"schedule.order={order}"]
    plain = train_on_pictures("prefix.store=off", *common)
    cached = train_on_pictures(f"prefix.store={store}", f"prefix.fill={fill}", *common)
    assert learned(cached) == learned(plain)
    records = events_of(cached, "cached")
    assert len(records) == 4
    for event in records:
        found = order == "descending" and event["visit"] % 3 == 1
        assert event["rows"] == 3 * 24
        assert event["computed"] == (0 if found else variants * 24)
        assert event["hits"] == 3 * 24 - (variants * 24 if fill == "lazy" and not found else 0)
        assert event["stale"] == event["damaged"] == 0
    assert stored_files(cached) == []


def test_a_single_image_that_is_missing_from_a_batch_is_not_computed_alone(
    train_on_pictures: Run, pictures, tmp_path: Path
):
    """Convolutions over one image take another kernel. A run whose rows in memory were lost differed by a last bit."""
    common = ["sampling.variants=2", "prefix.store=host", "schedule.sweeps=1"]
    settings = override(json.loads(json.dumps(pictures)), [*common, "checkpoint.every=1 steps"])
    with pytest.raises(Crash):
        bt.run(bt.RunConfig.from_mapping(settings), tmp_path / "run", listeners=[crash_at(14)])
    bt.resume(tmp_path / "run")
    assert learned(tmp_path / "run") == learned(train_on_pictures(*common))


def test_the_number_of_variants_changes_the_run(train_on_pictures: Run):
    runs = [train_on_pictures("prefix.store=off", f"sampling.variants={count}") for count in (1, 2)]
    fresh = train_on_pictures("prefix.store=off")
    assert len({tuple(curve(run)) for run in (*runs, fresh)}) == 3


@pytest.mark.parametrize("store", ["auto", "host"])
def test_images_augmented_differently_in_each_pass_are_refused_with_the_reason(train_on_pictures: Run, store: str):
    refused = train_on_pictures(f"prefix.store={store}")
    for event in events_of(refused, "cache"):
        assert event["place"] is None
        assert event["reason"].startswith(
            "refused: images get new random augmentations in each pass; set sampling.variants = 1"
        )
    assert learned(refused) == learned(train_on_pictures("prefix.store=off"))


def test_images_without_augmentation_need_no_variants(train_on_pictures: Run):
    plain, cached = (train_on_pictures(f"prefix.store={store}", "images.augment=none") for store in ("off", "host"))
    assert learned(cached) == learned(plain)
    assert [event["hits"] for event in events_of(cached, "cached")] == [2 * 24] * 4


def test_a_cache_on_the_card_leaves_the_room_of_the_largest_step(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took half of what was free before any moments or activations existed."""
    seen: list[float] = []

    def choose(facts: Any, wanted: str) -> StoreChoice:
        seen.append(facts.free_bytes["device"])
        return StoreChoice(place=None, reason="seen")

    monkeypatch.setattr(prefix_caching, "free_bytes", lambda *_: {"device": 1e9, "file": 1e9})
    monkeypatch.setattr(prefix_caching, "choose", choose)
    bt.run(tiny("sampling.scope=sweep", "sampling.rate=0.02"), tmp_path / "run")
    (memory,) = events_of(tmp_path / "run", "memory")
    steps = [block["parts"] for block in memory["blocks"]]
    own = [sum(parts.get(part, 0) for part in ("frozen", "active", "buffers")) for parts in steps]
    largest = max(sum(parts.values()) - mine for parts, mine in zip(steps, own, strict=True))
    assert largest > 0
    assert set(seen) == {1e9 - largest}

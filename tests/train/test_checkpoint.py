"""Checkpoints: whole or not at all, checked at load, and no dearer than what has changed."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import blocktrain as bt
from blocktrain.errors import CheckpointError, StorageError
from blocktrain.optim.precision import join
from blocktrain.records.run_records import Record, Step
from blocktrain.testing import run_distributed
from blocktrain.train import checkpoint as module
from blocktrain.train.checkpoint import CheckpointHeader, TrainerState, checkpoints, load_checkpoint, save_checkpoint
from blocktrain.train.context import build


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests must not change it."""
    return bt.run(tiny("checkpoint.keep=10"), tmp_path_factory.mktemp("finished") / "run").path


def newest(run: Path) -> Path:
    return checkpoints(run / "checkpoints")[-1]


def save(context, folder: Path, step: int, keep: int = 5) -> Path:
    saved = CheckpointHeader(progress=TrainerState(step=step), log_bytes=0, data="some rows")
    return save_checkpoint(folder, saved, partition=context.partition, trained=context.optimizer, keep=keep)


def one_step(context, block: int) -> None:
    with context.optimizer.visit(context.partition[block]):
        batch = context.data.train.batch([0, 1])
        context.model(**batch).loss.backward()
        context.optimizer.step()


def test_only_the_last_ones_are_kept(tiny, tmp_path: Path) -> None:
    bt.run(tiny(), tmp_path / "run")
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000010", "step-00000012"]


def test_frozen_blocks_are_linked_not_written_again(tiny, tmp_path: Path) -> None:
    context = build(tiny(), tmp_path)
    one_step(context, 0)
    first = save(context, tmp_path, 1)
    one_step(context, 1)
    second = save(context, tmp_path, 2)
    same = {path.name for path in first.iterdir() if os.path.samefile(path, second / path.name)}
    assert same == {"weights-0.safetensors", "state-0.safetensors", "weights-2.safetensors"}
    save(context, tmp_path, 3, keep=1)  # the linked files outlive the checkpoints they were first written for
    context.model.get_parameter("transformer.wte.weight").data.zero_()
    load_checkpoint(checkpoints(tmp_path)[0], context.partition, context.optimizer)
    assert context.model.get_parameter("transformer.wte.weight").abs().sum() > 0


@pytest.mark.parametrize("position", [0, 100, -1])
@pytest.mark.parametrize("name", ["weights-1.safetensors", "state-2.safetensors"])
def test_one_flipped_bit_is_found(tiny, finished: Path, tmp_path: Path, name: str, position: int) -> None:
    context = build(tiny(), tmp_path)
    copy = _copy(newest(finished), tmp_path)
    data = bytearray((copy / name).read_bytes())
    data[position] ^= 1
    (copy / name).write_bytes(data)
    before = {name: p.clone() for name, p in context.model.named_parameters()}
    with pytest.raises(CheckpointError, match=f"{name}' is damaged: its checksum is wrong"):
        load_checkpoint(copy, context.partition, context.optimizer)
    assert all(torch.equal(before[name], p) for name, p in context.model.named_parameters())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "weights-0.safetensors").unlink(), "cannot be read"),
        (lambda folder: (folder / "checkpoint.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "checkpoint.json").write_text("{}"), "cannot be read"),
        (lambda folder: _change_digit(folder / "checkpoint.json"), "its checksum is wrong"),
    ],
    ids=["missing file", "torn manifest", "empty manifest", "changed number"],
)
def test_missing_and_torn_files_are_found(tiny, finished: Path, tmp_path: Path, damage, message: str) -> None:
    context = build(tiny(), tmp_path)
    copy = _copy(newest(finished), tmp_path)
    damage(copy)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(copy, context.partition, context.optimizer)


def test_a_half_written_checkpoint_is_never_seen(tiny, tmp_path: Path) -> None:
    """A process killed while it writes leaves `.step-....partial`, or a folder without a manifest."""
    (tmp_path / ".step-00000005.partial").mkdir()
    (tmp_path / "step-00000006").mkdir()
    assert checkpoints(tmp_path) == []
    context = build(tiny(), tmp_path)
    written = save(context, tmp_path, 7)
    assert checkpoints(tmp_path) == [written]


def test_a_file_under_the_name_of_a_checkpoint_is_no_hindrance(tiny, tmp_path: Path) -> None:
    """It was taken for a folder, and no checkpoint could be written. A file with another name is not ours."""
    for name in (".step-x", ".step-00000005.partial", "step-00000006", ".step-00000007.partial"):
        (tmp_path / name).write_text("x")
    written = save(build(tiny(), tmp_path), tmp_path, 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-x", written.name]


@pytest.mark.parametrize("override", ["model.config.n_embd=32", "blocks.count=2", "model.config.n_layer=5"])
def test_another_model_is_refused(tiny, finished: Path, tmp_path: Path, override: str) -> None:
    context = build(tiny(override), tmp_path)
    with pytest.raises(CheckpointError, match="another model or another division into blocks"):
        load_checkpoint(newest(finished), context.partition, context.optimizer)


def fp32_values(context, index: int) -> dict[str, torch.Tensor]:
    """A block's masters, or its fp32 weights."""
    left = context.optimizer.block_low_bits(index)
    weights = context.optimizer.block_weights(index)
    return {name: join(value, left[name]) if name in left else value for name, value in weights.items()}


def test_a_run_that_changes_its_precision_loses_not_one_bit(tiny, tmp_path: Path) -> None:
    """fp32, then 8 bits with exact masters, then bf16, and back."""
    first = build(tiny(), tmp_path)
    one_step(first, 0)
    folder = save(first, tmp_path / "fp32", 1)
    for name in ("int8", "bf16-exact", "fp32"):
        context = build(tiny(f"precision={name}"), tmp_path)
        load_checkpoint(folder, context.partition, context.optimizer)
        for index in range(3):
            ours, theirs = fp32_values(context, index), fp32_values(first, index)
            assert all(value.dtype == torch.float32 and torch.equal(value, theirs[key]) for key, value in ours.items())
        folder = save(context, tmp_path / name, 1)
    assert not list(folder.glob("remainder-*"))


def test_the_first_checkpoint_in_another_precision_links_nothing(tiny, tmp_path: Path) -> None:
    """A file of fp32 weights beside low_bits would be read as something else."""
    first = build(tiny(), tmp_path)
    one_step(first, 0)
    old = save(first, tmp_path, 1)
    context = build(tiny("precision=bf16-exact"), tmp_path)
    load_checkpoint(old, context.partition, context.optimizer)
    new = save(context, tmp_path, 2)
    assert not any(path.samefile(old / path.name) for path in new.iterdir() if (old / path.name).exists())


def test_another_format_is_refused(tiny, finished: Path, tmp_path: Path) -> None:
    copy = _copy(newest(finished), tmp_path)
    manifest = json.loads((copy / "checkpoint.json").read_text())
    (copy / "checkpoint.json").write_text(json.dumps({**manifest, "format": 99}))
    context = build(tiny(), tmp_path)
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(copy, context.partition, context.optimizer)


def test_nothing_is_pickled(finished: Path) -> None:
    names = {path.suffix for path in newest(finished).iterdir()}
    assert names == {".safetensors", ".json"}


def test_a_failed_write_leaves_the_older_checkpoints(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = build(tiny(), tmp_path)
    first = save(context, tmp_path, 1, keep=1)
    one_step(context, 0)

    def no_room(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write", no_room)
    with pytest.raises(StorageError, match="no room left while writing"):
        save(context, tmp_path, 2, keep=1)
    assert checkpoints(tmp_path) == [first]
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_an_injected_failure_leaves_the_older_checkpoints(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """A full disk, a mount that has become read-only, a broken disk, a file handle that an NFS server has forgotten."""
    context = build(tiny(), tmp_path)
    first = save(context, tmp_path, 1, keep=1)
    one_step(context, 0)
    before = {path: path.read_bytes() for path in first.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StorageError, match=os.strerror(number)):
            save(context, tmp_path, 2, keep=1)
    assert checkpoints(tmp_path) == [first]
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert {path: path.read_bytes() for path in first.iterdir()} == before
    assert save(context, tmp_path, 2, keep=1).is_dir()


@pytest.mark.parametrize("missing", ["checkpoint.json", "weights-1.safetensors", "half of weights-1.safetensors"])
def test_a_checkpoint_that_was_copied_in_part_is_never_used(tiny, finished: Path, tmp_path: Path, missing: str) -> None:
    """`rsync` that was stopped: without its list of files a folder is no checkpoint; with it, what lacks is named."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    *older, last = checkpoints(run / "checkpoints")
    path = last / missing.removeprefix("half of ")
    if missing.startswith("half"):
        data = path.read_bytes()
        path.unlink()  # it may be a link to the older checkpoint's
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    if missing == "checkpoint.json":
        assert checkpoints(run / "checkpoints") == older
        return
    with pytest.raises(CheckpointError, match=f"{path.name}' (cannot be read|is damaged).*delete '{last}'"):
        bt.resume(run)


def test_a_clock_that_is_set_back_changes_nothing(tiny, tmp_path: Path, monkeypatch, outcome) -> None:
    whole = bt.run(tiny(), tmp_path / "whole").path
    now = iter(range(2_000_000_000, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    assert outcome(bt.run(tiny(), tmp_path / "run").path) == outcome(whole)


def train_on_a_full_disk(mapping: dict[str, Any], folder: str) -> tuple[int, str]:
    """The exit code and the message of a run in a process of its own, under a limit of the operating system: no file
    may grow past 8 kB, while block 1's weights take 26 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    try:
        bt.run(bt.RunConfig.from_mapping(mapping), folder)
    except StorageError as error:
        return error.exit_code, str(error)
    return 0, ""


def test_a_full_disk_stops_the_run_with_one_message(tiny, tmp_path: Path) -> None:
    build(tiny(), tmp_path)  # the data cache is written before the limit is set
    ((code, message),) = run_distributed(train_on_a_full_disk, 1, tiny().to_mapping(), str(tmp_path / "run"))
    assert code == 2
    assert message.startswith("no room left while writing")
    assert checkpoints(tmp_path / "run" / "checkpoints") == []
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def test_the_way_out_names_a_checkpoint_that_is_sound(tiny, tmp_path: Path) -> None:
    """A frozen block's file is shared with the checkpoint before: deleting the newer one would not help."""
    context = build(tiny(), tmp_path)
    one_step(context, 0)
    first = save(context, tmp_path, 1)
    one_step(context, 1)
    second = save(context, tmp_path, 2)
    for name, way_out in (("weights-1", f"delete '{second}' to go on from '{first.name}'"), ("weights-0", "no older")):
        good = (second / f"{name}.safetensors").read_bytes()
        (second / f"{name}.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=way_out):
            load_checkpoint(second, context.partition, context.optimizer)
        (second / f"{name}.safetensors").write_bytes(good)


def test_dropped_moments_are_not_kept_in_checkpoints(tiny, tmp_path: Path) -> None:
    context = build(tiny("optimizer.state=drop"), tmp_path)
    with context.optimizer.visit(context.partition[0]):
        context.model(**context.data.train.batch([0, 1])).loss.backward()
        context.optimizer.step()
        during = save(context, tmp_path, 1)
    after = save(context, tmp_path, 2)
    assert (during / "state-0.safetensors").exists()
    assert not (after / "state-0.safetensors").exists()


def test_a_file_system_without_hard_links_gets_copies(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    context = build(tiny(), tmp_path)
    save(context, tmp_path, 1)
    one_step(context, 1)
    load_checkpoint(save(context, tmp_path, 2), context.partition, context.optimizer)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(Path(json.decoder.__file__).read_text())
    return path


def test_changed_data_are_refused_unless_accepted(tiny, tmp_path: Path, corpus: Path, caplog) -> None:
    """Rows are numbers into the training set: of another set they would be other rows."""
    run = bt.run(tiny(f"text.source={corpus}"), tmp_path / "run").path
    corpus.write_text(corpus.read_text() + "# one more line\n")
    with pytest.raises(CheckpointError, match=r"the training data have changed since .* --accept-changed-data"):
        bt.resume(run)
    bt.resume(run, accepts_changed_data=True)
    assert "the training data have changed" in caplog.text


def test_data_are_known_by_their_content(tiny, tmp_path: Path, corpus: Path, outcome) -> None:
    """A resume used to refuse data whose time had changed, or that had been copied to another machine."""
    run = bt.run(tiny(f"text.source={corpus}"), tmp_path / "run").path
    shutil.rmtree(run / "checkpoints" / newest(run).name)  # so that there is something to do
    os.utime(corpus, (1, 1))
    bt.resume(run)
    elsewhere = tmp_path / "elsewhere" / corpus.name
    elsewhere.parent.mkdir()
    shutil.move(corpus, elsewhere)
    shutil.rmtree(run / "checkpoints" / newest(run).name)
    bt.resume(run, [f"text.source={elsewhere}", f"text.cache={tmp_path / 'new cache'}"])
    expected = bt.run(tiny(f"text.source={elsewhere}"), tmp_path / "never interrupted").path
    assert outcome(run) == outcome(expected)
    assert str(elsewhere) in (run / "run.json").read_text()


@pytest.mark.parametrize(
    ("key", "value"), [("optimizer.lr", 1.0), ("seed", 7), ("schedule.order", "shuffled"), ("batch.rows", 2)]
)
def test_a_configuration_that_was_edited_by_hand_is_refused(tiny, tmp_path: Path, key: str, value: object) -> None:
    """`run.json` used to be believed, so half of a run had another learning rate without a word."""
    run = bt.run(tiny(), tmp_path / "run").path
    contents = json.loads((run / "run.json").read_text())
    *tables, name = key.split(".")
    table = contents["config"]
    for part in tables:
        table = table[part]
    table[name] = value
    (run / "run.json").write_text(json.dumps(contents))
    with pytest.raises(CheckpointError, match=f"run.json' has another {key} than the newest checkpoint"):
        bt.resume(run)


@pytest.mark.parametrize("precision", ["bf16-exact", "int8"])
def test_rows_of_a_matrix_are_exported_as_trained(tiny, tmp_path: Path, precision: str) -> None:
    """Blocks that own rows of one matrix each have the remainder of theirs."""
    from blocktrain.train.export import export
    from blocktrain.train.run_folder import RunFolder

    small = ["model.config.n_layer=1", "blocks.largest=2000"]
    run = bt.run(tiny(*small, f"precision={precision}"), tmp_path / "run").path
    context = build(tiny(*small, "precision=bf16-exact"), tmp_path / "again")
    load_checkpoint(newest(run), context.partition, context.optimizer)
    assert any(block.rows for block in context.partition)
    expected = {name: parameter.detach().float() for name, parameter in context.model.named_parameters()}
    for block in context.partition:
        for name, remainder in context.optimizer.block_low_bits(block.index).items():
            mine = block.part(name, block.parameters[name].data)
            block.part(name, expected[name]).copy_(join(mine, remainder))
    export(RunFolder(run), tmp_path / "model")
    found = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected.items() if name in found)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in found.values())


def test_a_live_run_is_left_alone(tiny, tmp_path: Path) -> None:
    """`export`, and a refused `train` or `resume`, must not touch the moments that a running process keeps on disk."""
    from blocktrain.errors import ConfigError
    from blocktrain.train.export import export
    from blocktrain.train.run_folder import RunFolder

    config = tiny("optimizer.state=disk")
    bt.run(config, tmp_path / "undisturbed")
    refused = []

    def disturb(record: Record) -> None:
        if isinstance(record, Step) and record.step in (5, 9):
            export(RunFolder(tmp_path / "run"), tmp_path / f"model-{record.step}")
            for command in (lambda: bt.run(config, tmp_path / "run"), lambda: bt.resume(tmp_path / "run")):
                with pytest.raises(ConfigError) as error:
                    command()
                refused.append(str(error.value))

    bt.run(config, tmp_path / "run", listeners=[disturb])
    assert len(refused) == 4
    for name in ("weights-0", "weights-1", "weights-2"):
        a, b = (newest(tmp_path / run) / f"{name}.safetensors" for run in ("run", "undisturbed"))
        assert a.read_bytes() == b.read_bytes()


def _change_digit(path: Path) -> None:
    path.write_text(path.read_text().replace('"tokens": 7', '"tokens": 8'))


def _copy(source: Path, folder: Path) -> Path:
    import shutil

    return Path(shutil.copytree(source, folder / source.name))

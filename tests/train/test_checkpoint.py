"""Checkpoints: whole or not at all, checked at load, and no dearer than what has changed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import blocktrain as bt
from blocktrain.errors import CheckpointError, StorageError
from blocktrain.train import checkpoint as module
from blocktrain.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from blocktrain.train.job import build
from blocktrain.train.progress import Progress


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests must not change it."""
    return bt.run(tiny("checkpoint.keep=10"), tmp_path_factory.mktemp("finished") / "run").path


def newest(run: Path) -> Path:
    return checkpoints(run / "checkpoints")[-1]


def save(job, folder: Path, step: int, keep: int = 5) -> Path:
    progress = Progress(step=step)
    return save_checkpoint(
        folder, progress=progress, log_bytes=0, partition=job.partition, optimizer=job.optimizer, keep=keep
    )


def one_step(job, block: int) -> None:
    with job.optimizer.visit(job.partition[block]):
        batch = job.task.train.batch([0, 1])
        job.model(**batch).loss.backward()
        job.optimizer.step()


def test_only_the_last_ones_are_kept(tiny, tmp_path: Path) -> None:
    bt.run(tiny(), tmp_path / "run")
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000010", "step-00000012"]


def test_frozen_blocks_are_linked_not_written_again(tiny, tmp_path: Path) -> None:
    job = build(tiny(), tmp_path)
    one_step(job, 0)
    first = save(job, tmp_path, 1)
    one_step(job, 1)
    second = save(job, tmp_path, 2)
    same = {path.name for path in first.iterdir() if os.path.samefile(path, second / path.name)}
    assert same == {"weights-0.safetensors", "state-0.safetensors", "weights-2.safetensors"}
    save(job, tmp_path, 3, keep=1)  # the linked files outlive the checkpoints they were first written for
    job.model.get_parameter("transformer.wte.weight").data.zero_()
    load_checkpoint(checkpoints(tmp_path)[0], job.partition, job.optimizer)
    assert job.model.get_parameter("transformer.wte.weight").abs().sum() > 0


@pytest.mark.parametrize("position", [0, 100, -1])
@pytest.mark.parametrize("name", ["weights-1.safetensors", "state-2.safetensors"])
def test_one_flipped_bit_is_found(tiny, finished: Path, tmp_path: Path, name: str, position: int) -> None:
    job = build(tiny(), tmp_path)
    copy = _copy(newest(finished), tmp_path)
    data = bytearray((copy / name).read_bytes())
    data[position] ^= 1
    (copy / name).write_bytes(data)
    before = {name: p.clone() for name, p in job.model.named_parameters()}
    with pytest.raises(CheckpointError, match=f"{name}' is damaged: its checksum is wrong; delete '{copy}' to go on"):
        load_checkpoint(copy, job.partition, job.optimizer)
    assert all(torch.equal(before[name], p) for name, p in job.model.named_parameters())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "weights-0.safetensors").unlink(), "cannot be read"),
        (lambda folder: (folder / "checkpoint.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "checkpoint.json").write_text("{}"), "cannot be read"),
    ],
    ids=["missing file", "torn manifest", "empty manifest"],
)
def test_missing_and_torn_files_are_found(tiny, finished: Path, tmp_path: Path, damage, message: str) -> None:
    job = build(tiny(), tmp_path)
    copy = _copy(newest(finished), tmp_path)
    damage(copy)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(copy, job.partition, job.optimizer)


def test_a_half_written_checkpoint_is_never_seen(tiny, tmp_path: Path) -> None:
    """A process killed while it writes leaves `.step-....partial`, or a folder without a manifest."""
    (tmp_path / ".step-00000005.partial").mkdir()
    (tmp_path / "step-00000006").mkdir()
    assert checkpoints(tmp_path) == []
    job = build(tiny(), tmp_path)
    written = save(job, tmp_path, 7)
    assert checkpoints(tmp_path) == [written]


@pytest.mark.parametrize("override", ["model.config.n_embd=32", "blocks.count=2", "model.config.n_layer=5"])
def test_another_model_is_refused(tiny, finished: Path, tmp_path: Path, override: str) -> None:
    job = build(tiny(override), tmp_path)
    with pytest.raises(CheckpointError, match="another model or another division into blocks"):
        load_checkpoint(newest(finished), job.partition, job.optimizer)


def test_another_format_is_refused(tiny, finished: Path, tmp_path: Path) -> None:
    copy = _copy(newest(finished), tmp_path)
    manifest = json.loads((copy / "checkpoint.json").read_text())
    (copy / "checkpoint.json").write_text(json.dumps({**manifest, "format": 99}))
    job = build(tiny(), tmp_path)
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(copy, job.partition, job.optimizer)


def test_nothing_is_pickled(finished: Path) -> None:
    names = {path.suffix for path in newest(finished).iterdir()}
    assert names == {".safetensors", ".json"}


def test_a_failed_write_leaves_the_older_checkpoints(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = build(tiny(), tmp_path)
    first = save(job, tmp_path, 1, keep=1)
    one_step(job, 0)

    def no_room(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write", no_room)
    with pytest.raises(StorageError, match="no room left while writing"):
        save(job, tmp_path, 2, keep=1)
    assert checkpoints(tmp_path) == [first]
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_a_full_disk_stops_the_run_with_one_message(tiny, tmp_path: Path) -> None:
    """A real limit of the operating system: no file may grow past 8 kB, while block 1's weights take 26 kB."""
    script = (
        "import sys, json, pathlib, blocktrain as bt\n"
        "from blocktrain.errors import StorageError\n"
        "try: bt.run(bt.RunConfig.from_mapping(json.loads(sys.argv[1])), pathlib.Path(sys.argv[2]))\n"
        "except StorageError as error: print(error); sys.exit(error.exit_code)\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    build(tiny(), tmp_path)  # the data cache is written before the limit is set
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, json.dumps(tiny().to_mapping()), str(tmp_path / "run")],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert result.stdout.startswith("no room left while writing")
    assert checkpoints(tmp_path / "run" / "checkpoints") == []
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def _copy(source: Path, folder: Path) -> Path:
    import shutil

    return Path(shutil.copytree(source, folder / source.name))

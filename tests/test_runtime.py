"""Devices, seeds, and what a run records of its machine."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from blocktrain.errors import ConfigError, OutOfMemoryError
from blocktrain.runtime import (
    environment,
    page_locked,
    peak_memory_bytes,
    peak_reserved_bytes,
    pick_device,
    read_numbers,
    result_path,
    seed_everything,
    synchronize,
)

ROOT = Path(__file__).resolve().parents[1]


def drawn(*key: int) -> torch.Tensor:
    seed_everything(*key)
    return torch.rand(4)


def test_random_numbers_are_a_function_of_seed_and_key():
    assert torch.equal(drawn(3, 7, 0), drawn(3, 7, 0))
    draws = [drawn(*key) for key in ((3, 7, 0), (3, 7, 1), (3, 8, 0), (4, 7, 0), (3,), (3, 7))]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)


def test_the_smallest_and_the_largest_seed():
    drawn(2**64)
    drawn(0)


def test_a_device_is_found_by_name_and_by_default():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", str(torch.accelerator.current_accelerator()))


@pytest.mark.parametrize("name", ["gpu", "cuda:99", ""])
def test_a_missing_device_is_refused(name: str):
    with pytest.raises(ConfigError, match=rf"device '{name}' cannot be used here \(.+\); try 'auto' or 'cpu'"):
        pick_device(name)


class Cudart:
    """The part of CUDA's runtime that locks pages; it has locked `locked`: address -> bytes."""

    def __init__(self, error: int = 0):
        self.locked: dict[int, int] = {}
        self.bytes = 0
        self.error = error

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        self.bytes += -(-size // 4096) * 4096
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    found = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


@pytest.mark.parametrize(("width", "inner"), [(4096, 11008), (5120, 13824)], ids=["Llama-2-7B", "Llama-2-13B"])
def test_page_locked_weights_take_their_own_size(cudart: Cudart, width: int, inner: int):
    """PyTorch's allocator takes 1.31 and 1.69 times as much. (Nothing is written, so no memory is taken here.)"""
    layer = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)]
    needed = 0
    for shape in [(32000, width), *layer]:
        needed += page_locked(shape, torch.bfloat16).nbytes
    assert needed <= cudart.bytes <= 1.02 * needed
    assert not cudart.locked


def test_page_locked_memory_is_a_tensor_until_it_is_freed(cudart: Cudart):
    tensor = page_locked((2, 3), torch.int16).fill_(7)
    assert tensor.tolist() == [[7] * 3] * 2
    assert cudart.locked == {tensor.data_ptr(): 12}
    view = tensor[1]
    del tensor
    assert len(cudart.locked) == 1
    del view
    assert not cudart.locked
    assert page_locked((0, 3), torch.float32).shape == (0, 3)


def test_pages_that_cannot_be_locked_are_an_error(cudart: Cudart):
    cudart.error = 2
    with pytest.raises(
        OutOfMemoryError, match=r"does not lock 8 bytes more of host memory \(CUDA error 2\); end other"
    ):
        page_locked((2,), torch.float32)


def test_numbers_are_read_as_they_are():
    figures = [torch.tensor(0.1), 0.1, torch.tensor(0.3, dtype=torch.bfloat16)]
    assert read_numbers(figures) == [torch.tensor(0.1).item(), 0.1, torch.tensor(0.3, dtype=torch.bfloat16).item()]
    assert read_numbers([]) == []


def test_peak_memory_includes_what_was_allocated():
    device = torch.device("cpu")
    synchronize(device)
    allocated = torch.ones(2**24)  # 64 MiB
    assert 2**40 > peak_memory_bytes(device) > allocated.nbytes


def test_the_environment_can_be_recorded():
    recorded = json.loads(json.dumps(environment(torch.device("cpu"))))
    assert recorded["torch"] == torch.__version__
    assert recorded["device"] == "cpu"
    assert recorded["processor"]
    assert recorded["commit"] is None or len(recorded["commit"].rstrip("+")) == 40


def test_a_result_is_written_from_committed_code_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Results named commits that lacked what was measured: "+" behind a commit says only that."""
    root = tmp_path / "checkout"
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=result_path, default=str(root / "results" / "result.json"))

    def git(*words: str) -> None:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)

    def refused() -> bool:
        try:
            parser.parse_args([])
        except SystemExit:
            return True
        return False

    root.mkdir()
    assert not refused()  # no checkout
    git("init")
    (root / "measure.py").write_text("one")
    git("add", ".")
    git("commit", "-m", "one")
    assert parser.parse_args([]).out == root / "results" / "result.json"
    (root / "result.json").write_text("{}")  # other results are no code
    (root / "README.md").write_text("table")
    assert not refused()
    (root / "new.py").write_text("not added")
    assert refused()
    (root / "new.py").unlink()
    (root / "measure.py").write_text("two")
    assert refused()
    said = capsys.readouterr().err
    assert "'results/result.json' would name a commit that lacks your changes to 'measure.py'; commit them" in said
    assert parser.parse_args(["--out", str(tmp_path / "trial.json")]).out == tmp_path / "trial.json"


def test_every_script_that_writes_a_result_asks_for_its_place():
    scripts = [*ROOT.glob("experiments/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    writing = [path for path in scripts if re.search(r"--(out|write|result)\"", path.read_text())]
    assert len(writing) > 20
    lacking = [path.name for path in writing if "type=result_path" not in path.read_text()]
    assert lacking == ["parts.py"]  # it hands its own to run.py


def test_reserved_bytes_are_those_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7 if device.index == 1 else 0)
    assert peak_reserved_bytes(torch.device("cuda", 1)) == 7
    assert peak_reserved_bytes(torch.device("cpu")) is None

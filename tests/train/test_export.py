"""What `export` writes, from what: the dtype of the weights, no model that has diverged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import blocktrain as bt
from blocktrain.chain.pretrained import saved_dtype
from blocktrain.cli.main import main
from blocktrain.errors import ConfigError, NonFiniteError
from blocktrain.train.checkpoint import checkpoints
from blocktrain.train.export import ExportDtype, export
from blocktrain.train.run_folder import RunFolder

Weights = dict[str, torch.Tensor]

pytestmark = pytest.mark.usefixtures("uncounted")


def weights_of(folder: Path) -> Weights:
    return safetensors.torch.load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def pretrained(tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with its tokenizer, in three dtypes."""
    folder = tmp_path_factory.mktemp("pretrained")
    run = bt.run(tiny("stop.duration=1 steps"), folder / "run")
    dtypes: tuple[ExportDtype, ...] = ("fp32", "bf16", "fp16")
    return {dtype: export(run, folder / dtype, dtype=dtype) for dtype in dtypes}


def tuned(tiny, path: Path, out: Path, *overrides: str) -> RunFolder:
    """A short run on the model at `path`."""
    mapping = tiny("stop.duration=4 steps", *overrides).to_mapping()
    mapping["model"] = {"path": str(path)}
    return bt.run(bt.RunConfig.from_mapping(mapping), out)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_dtype_that_is_asked_for(name: str, dtype: torch.dtype, pretrained: dict[str, Path]) -> None:
    exact, found = weights_of(pretrained["fp32"]), weights_of(pretrained[name])
    assert found.keys() == exact.keys()
    assert all(torch.equal(found[key], value.to(dtype)) for key, value in exact.items())
    assert json.loads((pretrained[name] / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert saved_dtype(str(pretrained[name])) == dtype


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_default_is_the_dtype_at_model_path(
    name: str, tiny, pretrained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every export was in fp32, so that a model of 14 GB came out with 28."""
    run = tuned(tiny, pretrained[name], tmp_path / "run", "precision=bf16-exact")
    assert main(["export", str(run.path), str(tmp_path / "as it was")]) == 0
    assert f"in {'bfloat16' if name == 'bf16' else 'float16'}; load it with" in capsys.readouterr().out
    assert main(["export", str(run.path), str(tmp_path / "exact"), "--dtype", "fp32"]) == 0
    rounded, exact = weights_of(tmp_path / "as it was"), weights_of(tmp_path / "exact")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    assert all(torch.equal(rounded[key], value.to(dtype)) for key, value in exact.items())
    assert any(not torch.equal(value, value.to(dtype).float()) for value in exact.values())


def test_a_model_that_began_at_random_weights_is_exported_in_fp32(
    tiny, pretrained: dict[str, Path], tmp_path: Path
) -> None:
    mapping = tiny("stop.duration=1 steps").to_mapping()
    mapping["model"] = {"path": str(pretrained["bf16"]), "weights": "random"}
    run = bt.run(bt.RunConfig.from_mapping(mapping), tmp_path / "run")
    export(run, tmp_path / "model")
    assert {value.dtype for value in weights_of(tmp_path / "model").values()} == {torch.float32}


def test_a_dtype_that_cannot_hold_a_weight_is_refused(tiny, pretrained: dict[str, Path], tmp_path: Path) -> None:
    large = weights_of(pretrained["fp32"])
    large["transformer.ln_f.bias"][0] = 1e5
    path = tmp_path / "large"
    path.mkdir()
    for file in pretrained["fp32"].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    safetensors.torch.save_file(large, path / "model.safetensors", metadata={"format": "pt"})
    run = tuned(tiny, path, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"'transformer.ln_f.bias' has values of up to 1e\+05, and float16 ends at"):
        export(run, tmp_path / "model", dtype="fp16")
    assert not (tmp_path / "model").exists()
    export(run, tmp_path / "model", dtype="bf16")


def test_a_tokenizer_does_not_say_how_it_was_loaded(shared_data: Path, tmp_path: Path) -> None:
    """An exported tokenizer_config.json had `local_files_only`, which keeps its reader from the hub."""
    from blocktrain.data.tokenizer import load_tokenizer

    load_tokenizer(str(shared_data / "gpt2_tokenizer")).save(tmp_path)
    saved: dict[str, Any] = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert not {"local_files_only", "is_local", "name_or_path", "trust_remote_code"} & saved.keys()
    assert saved["tokenizer_class"] == "GPT2Tokenizer"
    assert load_tokenizer(str(tmp_path)).vocab_size == 50257


def test_a_run_that_diverged_is_not_exported(tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose last step blew up ended without an error, and its weights were exported without a word."""
    run = bt.run(tiny("stop.duration=1 steps", "optimizer.lr=1e38", "learning_rate.shape=constant"), tmp_path / "run")
    arguments = ["export", str(run.path), str(tmp_path / "model")]
    assert main(arguments) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "the last validation loss of" in message
    assert "is nan (step 1); the run has diverged" in message
    assert not (tmp_path / "model").exists()
    assert main([*arguments, "--force"]) == 0
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_weights_that_are_not_finite_are_not_exported(tiny, tmp_path: Path) -> None:
    """Where the run stopped before the next evaluation, the last validation loss does not show it."""
    run = bt.run(tiny("stop.duration=2 steps"), tmp_path / "run")
    path = checkpoints(run.checkpoints)[-1]
    name, manifest = "weights-2.safetensors", json.loads((path / "checkpoint.json").read_text())
    weights = safetensors.torch.load_file(path / name)
    weights["transformer.ln_f.bias"][0] = torch.nan
    (path / name).unlink()  # it may be a hard link
    data = safetensors.torch.save(weights)
    (path / name).write_bytes(data)
    manifest.pop("sha256")
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "checkpoint.json").write_text(json.dumps({**manifest, "sha256": digest}))
    with pytest.raises(NonFiniteError, match=r"'transformer.ln_f.bias' in .* has values that are not finite"):
        export(run, tmp_path / "model")
    export(run, tmp_path / "model", accepts_nonfinite=True)

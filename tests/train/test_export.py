"""What `export` writes, from what: the dtype of the weights, no model that has diverged."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import safetensors.torch
import torch

import blocktrain as bt
from blocktrain.chain.pretrained import saved_dtype
from blocktrain.cli.main import main
from blocktrain.data.facts import DataFacts
from blocktrain.data.text import TextConfig
from blocktrain.errors import CheckpointError, ConfigError, DataError, NonFiniteError, StorageError
from blocktrain.optim.precision import join
from blocktrain.train import export as export_module
from blocktrain.train.checkpoint import checkpoints, load_checkpoint, read_header
from blocktrain.train.context import build
from blocktrain.train.export import ExportDtype, export
from blocktrain.train.run_folder import RunFolder
from blocktrain.train.toml_dataclasses import override

from ..run_events import events_of

Weights = dict[str, torch.Tensor]

pytestmark = pytest.mark.usefixtures("uncounted")


def weights_of(folder: Path) -> Weights:
    return safetensors.torch.load_file(folder / "model.safetensors")


def rewrite(checkpoint: Path, **tables: dict[str, Any]) -> None:
    """Change entries of tables in a manifest."""
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    del manifest["sha256"]
    for key, entries in tables.items():
        manifest[key] |= entries
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (checkpoint / "checkpoint.json").write_text(json.dumps({**manifest, "sha256": digest}))


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
    with pytest.raises(NonFiniteError, match="has ended, but its validation loss is nan"):
        bt.run(tiny("stop.duration=1 steps", "optimizer.lr=1e30", "learning_rate.shape=constant"), tmp_path / "run")
    arguments = ["export", str(tmp_path / "run"), str(tmp_path / "model")]
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
    path, name = checkpoints(run.checkpoints)[-1], "weights-2.safetensors"
    weights = safetensors.torch.load_file(path / name)
    weights["transformer.ln_f.bias"][0] = torch.nan
    (path / name).unlink()  # it may be a hard link
    data = safetensors.torch.save(weights)
    (path / name).write_bytes(data)
    rewrite(path, files={name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}})
    with pytest.raises(NonFiniteError, match=r"'transformer.ln_f.bias' in .* has values that are not finite"):
        export(run, tmp_path / "model")
    export(run, tmp_path / "model", accepts_nonfinite=True)


CHAT = {"source": "corpus.jsonl", "row_tokens": 64, "validation_share": 0.3, "cache": "cache", "template": "mine.jinja"}
LABELLED = {"source": "corpus.jsonl", "row_tokens": 16, "validation_share": 0.3, "cache": "cache"}
ROWS = """{"prompt": "good", "completion": "film", "text": "a", "label": "x"}
{"prompt": "good", "completion": "film", "text": "b", "label": "y"}
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
WITHOUT_DATA = {
    "rows of matrices": ["precision=bf16-exact", "model.config.n_layer=1", "blocks.largest=2000"],
    "int8": ["precision=int8"],
    "bf16": ["precision=bf16"],
    "moments on disk": ["optimizer.state=disk"],
    "layers that grow": ["model.zero_residuals=true", "model.grown_layers=copied"],
    "chat": ["model.config.n_positions=64"],
    "labelled": [],
}


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_the_training_data_are_not_needed(
    name: str, tiny_mapping: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run copied without its data to another machine could not be exported: the data were opened first."""
    monkeypatch.chdir(tmp_path)
    mapping = json.loads(json.dumps(tiny_mapping))
    corpus = Path(mapping.pop("text")["source"]).read_text()
    Path("corpus.jsonl").write_text(ROWS * 20)
    Path("corpus.txt").write_text(corpus)
    Path("mine.jinja").write_text(TEMPLATE)
    text = {"source": "corpus.txt", "row_tokens": 16, "cache": "cache", "validation_share": 0.2}
    kind = name if name in ("chat", "labelled") else "text"
    mapping[kind] = {"chat": CHAT, "labelled": LABELLED}.get(kind, text)
    overrides = [*WITHOUT_DATA[name], "stop.duration=6 steps"]
    run = bt.run(bt.RunConfig.from_mapping(override(mapping, overrides)), "run")
    export(run, Path("with"), dtype="fp32")
    for path in ("corpus.txt", "corpus.jsonl", "mine.jinja"):
        Path(path).unlink()
    shutil.rmtree("cache")
    assert main(["export", "run", "without"]) == 0
    names = sorted(path.name for path in Path("with").iterdir())
    assert names == sorted(path.name for path in Path("without").iterdir() if path.name != "README.md")
    assert all((Path("with") / name).read_bytes() == (Path("without") / name).read_bytes() for name in names)
    if kind == "chat":
        assert (Path("without") / "chat_template.jinja").read_text() == TEMPLATE
    if kind == "labelled":
        assert json.loads(Path("without/config.json").read_text())["id2label"] == {"0": "x", "1": "y"}
    # what training arrived at, by way of the optimizer that a resumed run continues with
    Path("corpus.jsonl").write_text(ROWS * 20)
    Path("corpus.txt").write_text(corpus)
    Path("mine.jinja").write_text(TEMPLATE)
    config = run.config()
    if config.precision == "int8":
        config = dataclasses.replace(config, precision="bf16-exact")
    context = build(config, tmp_path / "again")
    load_checkpoint(checkpoints(run.checkpoints)[-1], context.partition, context.optimizer)
    found = weights_of(Path("without"))
    for block in context.partition:
        low_bits = context.optimizer.block_low_bits(block.index)
        for key, value in context.optimizer.block_weights(block.index).items():
            if key in found:  # a tied weight is saved once
                exact = join(value, low_bits[key]) if key in low_bits else value.float()
                assert torch.equal(block.part(key, found[key]), exact), key


def test_a_checkpoint_without_facts_is_refused(tiny, tmp_path: Path) -> None:
    run = bt.run(tiny("stop.duration=1 steps"), tmp_path / "run")
    path = checkpoints(run.checkpoints)[-1]
    facts = read_header(path).facts
    rewrite(path, facts={"tokenizer_fingerprint": "another"})
    with pytest.raises(DataError, match="tokenizer 'bytes' has changed since the model was trained with it"):
        export(run, tmp_path / "model")
    rewrite(path, facts=dict(facts), rows={"0": {"transformer.wte.weight": [0, 5]}})
    with pytest.raises(CheckpointError, match=r"another model than the configuration .* 'transformer.wte.weight'"):
        export(run, tmp_path / "model")
    contents = json.loads((path / "checkpoint.json").read_text())
    del contents["facts"], contents["sha256"]
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
    (path / "checkpoint.json").write_text(json.dumps({**contents, "sha256": digest}))
    with pytest.raises(CheckpointError, match="was written by an earlier version"):
        export(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_without_all_weights_is_refused(tiny, tmp_path: Path) -> None:
    """The model that a run.json describes after someone has changed it begins at random weights."""
    run = bt.run(tiny("stop.duration=1 steps"), tmp_path / "run")
    contents = run.read()
    contents["config"]["model"]["config"]["n_layer"] = 5
    (run.path / "run.json").write_text(json.dumps(contents))
    with pytest.raises(CheckpointError, match=r"\(3280 of the model's weights are not in it\)"):
        export(run, tmp_path / "model")


def test_data_sets_of_the_hub_are_facts(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of this machine can have a name like that of a data set; at the time of the export it may be gone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "mine").mkdir(parents=True)
    data = build(tiny(), tmp_path).data
    assert DataFacts.of(data, TextConfig(source="owner/data:main", validation="data/mine")).datasets == ("owner/data",)
    assert DataFacts.of(data, tiny().data).datasets == ()


def test_the_best_checkpoint_is_kept_and_exported(tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest two checkpoints were all that a run kept, so the model with the lowest validation loss was gone."""
    overrides = ["optimizer.lr=0.3", "learning_rate.shape=constant", "evaluation.every=2 steps", "stop.patience=4"]
    run = bt.run(tiny(*overrides, "schedule.visit=20 steps", "checkpoint.every=500 steps"), tmp_path / "run")
    scores = {event["step"]: event["loss"] for event in events_of(run.path, "evaluation") if event["step"]}
    best = min(scores, key=scores.__getitem__)
    (end,) = events_of(run.path, "end")
    assert end["steps"] == best + 2 * 4, "it stops four evaluations after the best one"
    assert f"has not improved for 4 evaluations (lowest: {scores[best]:.4g} at step {best})" in end["reason"]
    found = checkpoints(run.checkpoints)
    assert [int(path.name.removeprefix("step-")) for path in found] == [best, end["steps"]]
    for which in ("best", "newest", str(best)):
        assert main(["export", str(run.path), str(tmp_path / which), "--checkpoint", which]) == 0
    shown = capsys.readouterr().out
    assert f"exported step {best} (validation loss {scores[best]:.4f}) to" in shown
    exported = {which: weights_of(tmp_path / which) for which in ("best", "newest", str(best))}
    saved = safetensors.torch.load_file(found[0] / "weights-0.safetensors")
    for name, weight in saved.items():
        assert torch.equal(exported["best"][name], weight)
        assert torch.equal(exported[str(best)][name], weight)
    assert any(not torch.equal(exported["newest"][name], weight) for name, weight in saved.items())
    assert f"{scores[best]:.4f}" in (tmp_path / "best" / "README.md").read_text()


@pytest.mark.parametrize("what", ["_save_model", "card"])
def test_on_a_full_disk_nothing_is_left(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Literal["_save_model", "card"]
) -> None:
    """At the weights, and at the model card, which is written last. A file under the temporary name is no hindrance."""
    run = bt.run(tiny("stop.duration=2 steps"), tmp_path / "run")
    before = sorted(tmp_path.iterdir())

    def fill(*parts: Any) -> None:
        (parts[-1] / "half").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if what == "_save_model":
        monkeypatch.setattr(export_module, "_save_model", fill)
    (tmp_path / ".model.partial").write_text("x")
    with pytest.raises(StorageError, match=r"no room left while writing '.*model'"):
        export(run, tmp_path / "model", also=fill)
    assert sorted(tmp_path.iterdir()) == before


def test_a_checkpoint_that_is_not_there(tiny, tmp_path: Path) -> None:
    run = bt.run(tiny("stop.duration=2 steps", "checkpoint.keep_best=false"), tmp_path / "run")
    with pytest.raises(CheckpointError, match="has no checkpoint '7'; choose newest, best or a step: 2"):
        export(run, tmp_path / "model", checkpoint="7")
    rewrite(checkpoints(run.checkpoints)[-1], progress={"evaluated": 1})
    with pytest.raises(CheckpointError, match="none is known to be the best; choose a step: 2"):
        export(run, tmp_path / "model", checkpoint="best")


def test_the_best_of_the_checkpoints_is_not_the_best_of_the_run(
    tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["optimizer.lr=0.3", "learning_rate.shape=constant", "evaluation.every=2 steps"]
    run = bt.run(tiny(*overrides, "schedule.visit=20 steps", "checkpoint.every=20 steps"), tmp_path / "run")
    assert main(["export", str(run.path), str(tmp_path / "model"), "--checkpoint", "best"]) == 0
    assert "where no checkpoint was written" in capsys.readouterr().out


def test_a_checkpoint_of_an_earlier_version_has_no_best(tiny, tmp_path: Path) -> None:
    """It is resumed and exported as before."""
    run = bt.run(tiny("stop.duration=2 steps"), tmp_path / "run")
    newest = checkpoints(run.checkpoints)[-1]
    manifest = json.loads((newest / "checkpoint.json").read_text())
    del manifest["progress"]["best"], manifest["sha256"]
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (newest / "checkpoint.json").write_text(json.dumps({**manifest, "sha256": digest}))
    assert read_header(newest).progress.best == {}

"""The card says what the log says, in a header that the hub accepts, and nothing about this machine's folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import blocktrain as bt
from blocktrain.cli.main import main
from blocktrain.errors import CheckpointError
from blocktrain.integrations.card import card
from blocktrain.records.log import read_events
from blocktrain.records.run_records import Evaluation, Record
from blocktrain.train.checkpoint import checkpoints
from blocktrain.train.run_folder import RunFolder

from ..run_events import Crash
from ..train.test_export import rewrite


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return bt.run(tiny(), tmp_path_factory.mktemp("card") / "run")


def table(text: str) -> dict[str, str]:
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    return {name.strip(): value.strip() for name, value in rows}


def test_figures_are_those_of_the_log(run: RunFolder) -> None:
    events = read_events(run.events)
    end = events[-1]
    shown = table(card(run))
    assert shown["validation loss"] == f"{end['loss']:.4f} nats per token (step 12)"
    assert shown["validation loss per byte of text"] == f"{end['loss_per_byte']:.4f} nats"
    assert shown["optimizer steps"] == "12"
    assert shown["training tokens"] == f"{end['tokens']:,}" == "768"
    cost = events[1]["flops"]
    assert shown["FLOPs over those of as many full steps"] == f"{4 * sum(cost['blocks']) / (12 * cost['full']):.1%}"
    assert shown["optimizer"] == "AdamW, fp32, moments between visits: host"


def test_the_header_is_the_hubs(run: RunFolder) -> None:
    data: Any = ModelCard(card(run)).data
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "text-generation"
    assert "block-coordinate-descent" in data.tags
    (result,) = data.eval_results
    assert result.dataset_name == "corpus.txt"
    assert result.metric_value == read_events(run.events)[-1]["loss"]


def test_the_name_of_the_run_is_no_markup(run: RunFolder, tmp_path: Path) -> None:
    """A log can be edited, and a name may hold anything that can be printed."""
    copy = RunFolder(Path(shutil.copytree(run.path, tmp_path / "run")))
    header, *rest = read_events(run.events)
    lines = [{**header, "name": "a <b>[x](y)\n# b"}, *rest]
    copy.events.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert r"# a &lt;b&gt;\[x\](y)\\n\# b" in card(copy).splitlines()


def test_it_tells_no_folders(run: RunFolder) -> None:
    text = card(run)
    assert str(run.path.anchor + run.path.parts[1]) not in text
    config = json.loads(text.split("```json")[1].split("```")[0])
    assert config["text"]["source"] == "corpus.txt"
    assert config["optimizer"]["lr"] == 0.01


def test_of_an_interrupted_run_it_describes_the_checkpoint(tiny, tmp_path: Path) -> None:
    """The log goes on behind the newest checkpoint: those steps are not in the exported weights."""

    def crash(record: Record) -> None:
        if isinstance(record, Evaluation) and record.step == 9:
            raise Crash

    with pytest.raises(Crash):
        bt.run(tiny(), tmp_path / "run", listeners=[crash])
    shown = table(card(RunFolder(tmp_path / "run")))
    assert shown["optimizer steps"] == "8"
    assert shown["validation loss"].endswith("(step 6)")
    assert "peak memory" not in shown


def test_without_a_checkpoint_there_is_nothing_to_describe(tiny, tmp_path: Path) -> None:
    RunFolder(tmp_path).create(tiny(), method="bcd", environment={}, command="")
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        card(RunFolder(tmp_path))


def test_export_writes_it(run: RunFolder, tmp_path: Path) -> None:
    assert main(["export", str(run.path), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "README.md").read_text() == card(run)


BASE_CARD = "---\nlicense: other\nlicense_name: tiny\nlicense_link: https://example.org\nbase_model: a/b\n---\n# Base\n"


def test_base_license_and_data_sets_are_named_where_known(tiny, run: RunFolder, tmp_path: Path) -> None:
    base = tmp_path / "models--owner--base" / "snapshots" / "0123abc"
    assert main(["export", str(run.path), str(base)]) == 0
    (base / "README.md").write_text(BASE_CARD)
    mapping = tiny("stop.duration=1 steps").to_mapping()
    mapping["model"] = {"path": str(base)}
    tuned = bt.run(bt.RunConfig.from_mapping(mapping), tmp_path / "tuned")
    data: Any = ModelCard(card(tuned)).data
    assert (data.base_model, data.license, data.license_name) == ("owner/base", "other", "tiny")
    assert data.license_link == "https://example.org"
    assert data.datasets is None
    rewrite(checkpoints(tuned.checkpoints)[-1], facts={"datasets": ["owner/data"]})
    named: Any = ModelCard(card(tuned)).data
    assert named.datasets == ["owner/data"]
    alone: Any = ModelCard(card(run)).data
    assert (alone.base_model, alone.license, alone.datasets) == (None, None, None)


@pytest.mark.parametrize("text", [None, "no header", "---\n: [\n---\n"])
def test_a_base_model_whose_card_says_nothing(text: str | None, tiny, run: RunFolder, tmp_path: Path) -> None:
    assert main(["export", str(run.path), str(tmp_path / "base")]) == 0
    (tmp_path / "base" / "README.md").unlink()
    if text is not None:
        (tmp_path / "base" / "README.md").write_text(text)
    mapping = tiny("stop.duration=1 steps").to_mapping()
    mapping["model"] = {"path": str(tmp_path / "base")}
    data: Any = ModelCard(card(bt.run(bt.RunConfig.from_mapping(mapping), tmp_path / "tuned"))).data
    assert (data.base_model, data.license) == (None, None)

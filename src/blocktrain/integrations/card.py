"""The model card of an exported run: a README.md with the figures of the run's own log.

The log has what a reader of a model wants to know: what was trained on which data, for how long, at what cost, and how
well. The card states nothing that the run did not measure, and of local paths only the last part.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, hf_hub_download

from blocktrain.chain.resnet import ResNet
from blocktrain.data.facts import DataFacts
from blocktrain.parse import printable
from blocktrain.records.run_records import Evaluation
from blocktrain.report.format import flops_text
from blocktrain.report.run import RunRecord
from blocktrain.train.checkpoint import find_checkpoint, read_header, step_of
from blocktrain.train.config import RunConfig
from blocktrain.train.run_folder import RunFolder
from blocktrain.units import format_bytes, format_count, format_seconds

CARD = """---
{header}
---

# {name}

{model} with {parameters} parameters, trained with [blocktrain](https://arxiv.org/abs/2506.12037): {how}.

## Results

| | |
|---|---|
{figures}

Losses are on validation data that the model was not trained on. FLOPs are counted, not estimated. Seconds and memory
were measured on {hardware}.

## Data

{data}

## Configuration

```json
{config}
```
"""


def write_card(folder: RunFolder, out: Path, checkpoint: str = "newest") -> None:
    """Write `out/README.md` for a checkpoint of the run in `folder`, with the header that the hub reads."""
    (out / "README.md").write_text(card(folder, checkpoint), encoding="utf-8")


def card(folder: RunFolder, checkpoint: str = "newest") -> str:
    """The text of the card. Raises `CheckpointError` where the run has no such checkpoint (`find_checkpoint`)."""
    chosen = find_checkpoint(folder.checkpoints, checkpoint)
    step = step_of(chosen)
    run, config = RunRecord.load(folder.path), folder.config()
    facts = DataFacts.from_mapping(read_header(chosen).facts)
    evaluation = next((row for row in reversed(run.evaluations) if row.step <= step), None)
    environment = run.details.get("environment", {})
    hardware = [str(environment[key]) for key in ("device", "processor", "platform") if environment.get(key)]
    data: Any = config.data  # of any registered kind: a dataclass
    values = {field.name: getattr(data, field.name) for field in fields(data)}
    places = {name: _last_part(value) for name, value in values.items() if isinstance(value, str)}
    return CARD.format(
        header=_header(run, config, facts, evaluation).to_yaml(),
        name=_plain(run.header.name),
        model=_plain(run.header.model),
        parameters=format_count(run.header.parameters),
        how=_how(run),
        figures="\n".join(f"| {name} | {value} |" for name, value in _figures(run, step, evaluation)),
        hardware=", ".join(hardware) or "the machine it ran on",
        data=config.data_kind.describe(replace(data, **places)),
        config=json.dumps(_without_places(config.to_mapping()), indent=1, ensure_ascii=False),
    )


# What a run counts -> the hub's name for the task of its model
TASKS = {"tokens": "text-generation", "texts": "text-classification", "images": "image-classification"}


def _header(run: RunRecord, config: RunConfig, facts: DataFacts, found: Evaluation | None) -> ModelCardData:
    metrics = []
    if found is not None:
        metrics.append(("loss", f"validation loss, nats per {run.header.unit.removesuffix('s')}", found.loss))
        if found.accuracy is not None:
            metrics.append(("accuracy", "validation accuracy", found.accuracy))
    task = TASKS[run.header.unit]
    dataset = _last_part(config.data.source)
    began_at = config.model.path if config.model.weights == "pretrained" else None
    return ModelCardData(
        **({} if began_at is None else _license(began_at)),
        library_name="pytorch" if run.header.model == ResNet.__name__ else "transformers",
        pipeline_tag=task,
        base_model=None if began_at is None else _repository(began_at),
        datasets=list(facts.datasets) or None,
        tags=["blocktrain", "block-coordinate-descent"],
        model_name=run.header.name,
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type=dataset,
                dataset_name=dataset,
                dataset_split="validation",
                metric_type=kind,
                metric_name=name,
                metric_value=value,
            )
            for kind, name, value in metrics
        ]
        or None,
    )


def _plain(text: str) -> str:
    """`text` on one line of Markdown, where it is neither markup nor a tag."""
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", html.escape(printable(text), quote=False))


def _is_on_hub(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def _repository(path: str) -> str | None:
    """The hub's name of the model at `path`: its own, or that of the cached snapshot that it is."""
    if _is_on_hub(path):
        return path
    snapshot = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/\w+", Path(path).expanduser().resolve().as_posix())
    return None if snapshot is None else "/".join(snapshot.groups())


def _license(path: str) -> dict[str, Any]:
    """What the card of the model at `path` says of its license; nothing where it cannot be read."""
    folder = Path(path).expanduser()
    try:
        file = folder / "README.md" if folder.is_dir() else Path(hf_hub_download(path, "README.md"))
        base = ModelCard(file.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.to_dict()
    except Exception:  # the hub, its YAML and the system each raise their own classes
        return {}
    return {key: base[key] for key in ("license", "license_name", "license_link") if base.get(key)}


def _how(run: RunRecord) -> str:
    if run.is_full:
        return "all parameters at once"
    count = len(run.header.blocks)
    above = "" if run.header.span == "block" else " together with all blocks above it"
    return f"every parameter, one of {count} blocks at a time{above}, by block coordinate descent"


def _figures(run: RunRecord, step: int, found: Evaluation | None) -> Iterator[tuple[str, str]]:
    """The rows of the table of results. `found` is the last evaluation at or before `step`, the checkpoint's."""
    if found is not None:
        yield "validation loss", f"{found.loss:.4f} nats per {run.header.unit.removesuffix('s')} (step {found.step})"
        if found.loss_per_byte is not None:
            yield "validation loss per byte of text", f"{found.loss_per_byte:.4f} nats"
        if found.accuracy is not None:
            yield "validation accuracy", f"{found.accuracy:.2%}"
    yield "optimizer steps", f"{step:,}"
    yield f"training {run.header.unit}", f"{step * run.header.tokens_per_step:,}"
    if run.cost is not None:
        yield "FLOPs", flops_text(run.flops_until(step))
        full = run.cost.flops.full
        if not run.is_full and full:
            share = run.flops_until(step) / (step * full) if step else 1.0
            yield "FLOPs over those of as many full steps", f"{share:.1%}"
    if run.end is not None:
        yield "seconds", format_seconds(run.end.seconds)
        if run.end.peak_memory_bytes:
            yield "peak memory", format_bytes(run.end.peak_memory_bytes)
        if run.end.optimizer_bytes:
            yield "optimizer state at its largest", format_bytes(run.end.optimizer_bytes)
    yield "optimizer", f"{run.header.optimizer}, {run.header.precision}, moments between visits: {run.header.state}"


def _last_part(place: str) -> str:
    """The last part of a path on this machine; the name of a repository of the hub, and anything else, as it is."""
    path = Path(place).expanduser()
    mine = path.is_absolute() or place.startswith(("./", "../")) or ("/" in place and path.exists())
    return path.name if mine else place


def _without_places(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_places(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_places(item) for item in value]
    return _last_part(value) if isinstance(value, str) else value

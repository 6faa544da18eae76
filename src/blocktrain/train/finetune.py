"""The configuration that `blocktrain finetune` runs: recognized from the model and the data, planned for the machine.

    from the data       kind, length of a row
    from the planner    precision, blocks, frozen place, checkpointing and micro-batch, for the memory that is free
    stated defaults     the constants below, and `pretrained_defaults.py`

What the user sets wins over all of it, and what is chosen afterwards takes it into account.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from blocktrain.data import DATA_KINDS
from blocktrain.data.chat import ChatRows
from blocktrain.data.kinds import TrainingData
from blocktrain.data.recognition import recognize
from blocktrain.errors import ConfigError
from blocktrain.parallel.ranks import is_launched
from blocktrain.plan.calibrate import measure
from blocktrain.plan.configure import step_config
from blocktrain.plan.fit import BLOCK_COUNTS, Candidate, Capacity, Overflow, Request, fit
from blocktrain.plan.hardware import Rates, calibrated, load_calibration, load_hardware
from blocktrain.plan.layout import PRECISION_SPECS, Checkpointing, Layout, MomentFormat, MomentPlace
from blocktrain.plan.memory import host_parts, plan_memory
from blocktrain.plan.spec import ModelSpec, config_values
from blocktrain.runtime import available_memory_bytes, environment, free_memory_bytes, may_be_on_hub, pick_device
from blocktrain.train.auto_micro_batch import SHARE, divisors
from blocktrain.train.config import RunConfig
from blocktrain.train.count_spec import hub_config, spec_of
from blocktrain.train.toml_dataclasses import override
from blocktrain.units import BatchGeometry, format_bytes, format_count, format_seconds

Method = Literal["blocks", "full"]

EPOCHS = 3.0  # as in the recipes of full fine-tuning that `pretrained_defaults.py` names
ROWS, FEWEST_STEPS = 16, 60  # rows of an optimizer step; fewer where these would leave fewer steps
FEWEST_BLOCKS = 3
ORDER = "descending"  # the layers next to the head first
VISIT_STEPS, FEWEST_SWEEPS = 50, 2  # a visit is shorter where the run would have fewer sweeps
MOST_WARMUP = 10  # steps; at most a tenth of the run
EVALUATIONS = 5  # during the run, beside those before and after it
ROW_TOKENS = {"chat": 512, "text": 512, "labelled": 128}  # by the kind of data
LONGEST_ROW, WHOLE = 4096, 0.99  # rows grow up to this, until this share of the conversations fits into one

# What is tried in turn until something fits, with ever more blocks each: precisions, and moments between visits.
GPU_PRECISIONS, CPU_PRECISIONS = ("bf16-exact", "int8", "nf4", "fp32"), ("fp32", "bf16-exact", "int8", "nf4")
MOMENTS: Sequence[tuple[MomentFormat, MomentPlace]] = (("fp32", "host"), ("8bit", "host"), ("fp32", "drop"))
# What the planner calls the values of optimizer.state and memory.checkpointing; it has no moments on a disk.
STATES: Mapping[str | None, MomentPlace] = {"drop": "drop", "host": "host", "disk": "drop"}
CHECKPOINTING: Mapping[str | None, Checkpointing] = {"off": "none", "layers": "layers"}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run may use.

    free, host: bytes of the device and of the host. is_shared: the device computes in the host's memory.
    """

    name: str
    free: float
    host: float
    is_shared: bool
    rates: Rates


@dataclass(frozen=True, kw_only=True)
class Finetuning:
    """A configuration, and what was chosen in it and why, one line each."""

    config: RunConfig
    lines: Sequence[str]


def finetuning(
    model: str,
    source: str,
    *,
    method: Method = "blocks",
    epochs: float = EPOCHS,
    max_tokens: int | None = None,
    memory: int | None = None,
    overrides: Sequence[str] = (),
) -> Finetuning:
    """The configuration that trains `model`, a folder or hub name, on `source`. Tokenizes the data; loads no weights.

    epochs, max_tokens: the length of the run, the shorter of the two.
    memory: bytes of the device that may be used, instead of what is free.
    overrides: `a.b=c`, which win.

    Raises `ConfigError` or `DataError` for a model or data that cannot be trained, or do not fit.
    """
    if is_launched():
        raise ConfigError(
            "finetune runs in one process; print its configuration with --print-config, and train that with torchrun"
        )
    given = override({}, overrides)
    kind = next((name for name in DATA_KINDS if name in given), None)
    kind, found_by = (kind, "what --set names") if kind is not None else recognize(source)
    if kind not in ROW_TOKENS:
        raise ConfigError(
            f"'{source}' holds [{kind}], and finetune trains on {', '.join(ROW_TOKENS)}; write a configuration for "
            "'blocktrain train' instead"
        )
    spec = model_spec(model, classifies=kind == "labelled")
    longest = min(LONGEST_ROW if kind == "chat" else ROW_TOKENS[kind], spec.positions)
    name = f"{Path(model).name}-{Path(source).stem}"[:100]
    start = {
        "name": name if name.isprintable() else "finetune",
        kind: {"source": source, "row_tokens": longest},
        "model": {"path": model},
        "schedule": {"visit": "1 steps", "order": ORDER},
        "stop": {"duration": f"{epochs} epochs"},
    }
    draft = RunConfig.from_mapping(override(start, overrides))  # refuses what the user sets wrongly, at once
    data = draft.data_kind.open(draft.data, seed=draft.seed)
    if isinstance(data.train, ChatRows) and "row_tokens" not in given.get(kind, {}):
        needed = 64 * math.ceil(data.train.tokens_that_hold(WHOLE) / 64)
        start[kind]["row_tokens"] = min(longest, max(ROW_TOKENS[kind], needed))
        draft = RunConfig.from_mapping(override(start, overrides))
        data = draft.data_kind.open(draft.data, seed=draft.seed)
    row_tokens, count = data.row_tokens or 1, len(data.train)
    most_rows = min(epochs * count, math.inf if max_tokens is None else max_tokens / row_tokens)
    rows = 1 << max(1, min(ROWS, count, int(most_rows / FEWEST_STEPS))).bit_length() - 1
    rows = draft.batch.rows if "rows" in given.get("batch", {}) else rows
    geometry = BatchGeometry(tokens_per_step=rows * data.units_per_row, rows_per_step=rows, rows_per_epoch=count)
    steps = draft.stop.duration.in_steps(geometry) if draft.stop.duration else math.ceil(most_rows / rows)
    if max_tokens is not None:
        steps = max(1, min(steps, max_tokens // (row_tokens * rows)))
    machine = this_machine(draft.device, memory)
    request = _request(spec, machine, given, seq=row_tokens, rows=rows, tokens=steps * rows * row_tokens)
    if not draft.data_kind.has_vocabulary:
        request = replace(request, loss_chunk=0)
    best = choose(request, machine, method)
    visit = steps if method == "full" else math.ceil(steps / best.layout.blocks / FEWEST_SWEEPS)
    values = _step_values(request, best.layout, given)
    values |= {"name": start["name"], kind: start[kind], "model": start["model"]}
    values["schedule"] = {"order": ORDER, "visit": f"{visit if method == 'full' else min(VISIT_STEPS, visit)} steps"}
    values["stop"] = {"duration": f"{steps} steps"}
    values["learning_rate"] = {"warmup_steps": max(1, min(MOST_WARMUP, steps // 10))}
    every = f"{math.ceil(steps / (EVALUATIONS + 1))} steps"
    values["evaluation"] = {"every": every, "batch_rows": values["batch"].get("micro_rows", rows)}
    config = RunConfig.from_mapping(override(values, overrides))
    head = f"data      {source} is [{kind}] (by {found_by}): {_size(data)}"
    return Finetuning(config=config, lines=[head, *_explained(config, request, best, machine, steps)])


def model_spec(model: str, *, classifies: bool = False) -> ModelSpec:
    """The shape of the model in a folder or on the hub, from its configuration alone; raises `ConfigError` where there
    is none, or it does not predict the next token. classifies: it gets a head for classes, so an encoder will do."""
    path = Path(model).expanduser()
    if path.is_dir() and (path / "config.json").exists():
        values = config_values(path)
    elif path.exists() or not may_be_on_hub(model):
        raise ConfigError(
            f"'{model}' is no folder with a config.json (seen from {Path.cwd()}), and no name on the hub; give a "
            "folder that from_pretrained loads, or a hub name"
        )
    else:
        values = hub_config(model)
    if classifies:
        values = {**values, "is_decoder": True}
    return spec_of(values, model)


def this_machine(device_name: str, memory: int | None = None) -> Machine:
    """The device called `device_name`, with its rates: those that `blocktrain calibrate` stored, or else measured now.

    memory: bytes, instead of those that are free.
    """
    device, hardware = pick_device(device_name), load_hardware()
    name = str(environment(device)["device"])
    try:
        stored = load_calibration()
    except ConfigError:
        stored = None
    found = stored if stored is not None and stored.device == name else measure(device, tries=1)
    return Machine(
        name=name,
        free=float(memory or free_memory_bytes(device)),
        host=float(available_memory_bytes()),
        is_shared=device.type == "cpu",
        rates=calibrated(found, hardware),
    )


def choose(request: Request, machine: Machine, method: Method = "blocks") -> Candidate:
    """The layout to train with: the first that fits, by precision, by what is kept of the moments, and by blocks, few
    before many; if none does, the fastest of those that save memory at any price (frozen weights on the host, blocks
    smaller than a layer). Raises `ConfigError` where nothing fits."""
    nearest: Overflow | None = None
    for tried in _in_order(request, machine, method):
        host = _host_bytes(tried) if machine.is_shared else 0.0
        found = fit(replace(tried, capacity=replace(tried.capacity, card=tried.capacity.card - host)))
        for candidate in found.candidates:
            taken = candidate.memory.peak + (candidate.memory.host_bytes if machine.is_shared else 0.0)
            if taken <= tried.capacity.card:
                return candidate
        if found.overflow is not None and (nearest is None or found.overflow.ratio < nearest.ratio):
            nearest = found.overflow
    if nearest is None:
        raise ConfigError(
            f"'{request.spec.name}' has {request.spec.layers + 2} layers, so it cannot be trained in "
            f"{request.blocks} blocks of whole layers; set a smaller blocks.count"
        )
    way_out = "leave out --method full" if method == "full" else "choose a smaller model, shorter rows, or more memory"
    raise ConfigError(
        f"'{request.spec.name}' does not fit: it takes at least {format_bytes(nearest.need)} of {nearest.what}, mostly "
        f"for {nearest.part}, and {format_bytes(nearest.there)} may be used; {way_out}"
    )


def _in_order(request: Request, machine: Machine, method: Method) -> Iterator[Request]:
    precisions = CPU_PRECISIONS if machine.is_shared else GPU_PRECISIONS
    precisions = precisions if request.precision is None else (request.precision,)
    if method == "full":
        yield from (replace(request, methods=("full",), precision=precision) for precision in precisions)
        return
    counts = [count for count in BLOCK_COUNTS if count >= FEWEST_BLOCKS]
    counts = counts if request.blocks is None else [request.blocks]
    for precision, (moments, state), count in product(precisions, MOMENTS, counts if request.largest is None else ()):
        yield replace(
            request,
            precision=precision,
            moments=request.moments or moments,
            state=request.state or state,
            blocks=count,
            frozen=request.frozen or "device",
        )
    yield request


def _host_bytes(request: Request) -> float:
    """What a layout in blocks keeps on the host, beside the device's memory."""
    layout = Layout(
        blocks=request.blocks or FEWEST_BLOCKS,
        precision=PRECISION_SPECS[request.precision or "fp32"],
        moments=request.moments or "fp32",
        state=request.state or "host",
    )
    return float(sum(host_parts(request.spec, layout).values())) if request.methods == ("bcd",) else 0.0


def _request(
    spec: ModelSpec, machine: Machine, given: Mapping[str, Any], *, seq: int, rows: int, tokens: int
) -> Request:
    """What the planner is asked, with the choices that the user has made."""
    blocks, optimizer, memory = (given.get(table, {}) for table in ("blocks", "optimizer", "memory"))
    needs_fp32 = optimizer.get("tail", "none") != "none"
    return Request(
        spec=spec,
        card=machine.name,
        cards=1,
        tokens=tokens,
        seq=seq,
        rows=rows,
        rates=machine.rates,
        capacity=Capacity(
            card=SHARE * machine.free,
            host=SHARE * machine.host,
            disk=float(shutil.disk_usage(Path.cwd()).free),
            fragmentation=0.0 if machine.is_shared else load_hardware().assumed.fragmentation,
        ),
        blocks=blocks.get("count"),
        pieces=blocks.get("pieces", "layers"),
        largest=blocks.get("largest"),
        precision=given.get("precision", "fp32" if needs_fp32 else None),
        moments=optimizer.get("moments", "fp32" if "name" in optimizer else None),  # only AdamW has others
        state=STATES.get(optimizer.get("state")),
        frozen=memory.get("frozen"),
        checkpointing=CHECKPOINTING.get(memory.get("checkpointing")),
        loss_chunk=memory.get("loss_chunk"),
        cache="off",
    )


def _step_values(request: Request, layout: Layout, given: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a step, without what another one that the user has set excludes."""
    values = step_config(request.spec, layout, seq=request.seq, rows=request.rows)
    del values["text"], values["optimizer"]["lr"], values["optimizer"]["weight_decay"]
    values["batch"]["micro_rows"] = next(size for size in divisors(request.rows) if size <= layout.micro_rows)
    optimizer = given.get("optimizer", {})
    if "name" in optimizer:
        del values["optimizer"]["options"]
    if optimizer.get("in_backward"):
        del values["optimizer"]["max_grad_norm"]
    if optimizer.get("in_backward") or optimizer.get("tail", "none") != "none":
        del values["batch"]["micro_rows"]
    if {"largest", "patterns"} & given.get("blocks", {}).keys():
        del values["blocks"]
    return values


def _size(data: TrainingData) -> str:
    what = "texts" if data.unit == "texts" else "rows"
    return f"{len(data.train)} {what} of at most {data.row_tokens} tokens, {len(data.validation)} more to validate on"


def _explained(config: RunConfig, request: Request, best: Candidate, machine: Machine, steps: int) -> Iterator[str]:
    spec, layout, memory = request.spec, best.layout, config.memory
    micro_rows = config.batch.micro_rows or config.batch.rows
    yield (
        f"model     {spec.name}: {spec.architecture}, {format_count(spec.parameters)} parameters in {spec.layers + 2} "
        "layers"
    )
    ways = [config.precision, "one block, which is full training"]
    if layout.blocks > 1:
        why = f" (the fewest that fit, {FEWEST_BLOCKS} or more)" if request.blocks is None else ""
        ways = [config.precision, f"{layout.blocks} blocks{why}", f"frozen weights on the {memory.frozen}"]
        ways += ["8-bit moments"] * (config.optimizer.moments == "8bit")
        ways += ["moments dropped after each visit"] * (config.optimizer.state == "drop")
    ways += ["each layer's activations computed again"] * (memory.checkpointing == "layers")
    ways += [f"the logits of {memory.loss_chunk} tokens at a time"] * (memory.loss_chunk is not None)
    ways += [f"micro-batches of {micro_rows} x {request.seq} tokens"]
    yield (
        f"memory    {machine.name} with {format_bytes(machine.free)}: {', '.join(ways)}; planned peak "
        f"{format_bytes(best.memory.peak)}, and {format_bytes(best.memory.host_bytes)} kept on the host"
    )
    if layout.blocks > 1:
        exact = PRECISION_SPECS["bf16-exact"] if layout.precision.quantized else layout.precision
        plain = Layout(
            method="full", blocks=1, precision=exact, micro_rows=layout.micro_rows, loss_chunk=layout.loss_chunk,
            checkpointing=layout.checkpointing,
        )  # fmt: skip
        full = plan_memory(spec, plain, seq=request.seq, micro_steps=-(-request.rows // layout.micro_rows)).peak
        fits = "fits as well (--method full)" if full <= request.capacity.card else "does not fit"
        yield f"          full training would take {format_bytes(full)} for the same micro-batch, which {fits}"
    order = config.schedule.order if isinstance(config.schedule.order, str) else "in the order that is set"
    tokens = format_count(steps * request.rows * request.seq)
    yield (
        f"training  {steps} steps of {request.rows} x {request.seq} tokens, {tokens} in all; visits of "
        f"{config.schedule.visit}, {order}; learning rate {config.optimizer.lr:g}, {config.learning_rate.shape} after "
        f"{config.learning_rate.warmup_steps} steps of warm-up (defaults; change any key with --set)"
    )
    if steps < layout.blocks:
        yield f"          only {steps} of {layout.blocks} blocks get a visit; train longer with --epochs"
    yield f"time      about {format_seconds(best.seconds)} for the steps by measured rates; evaluations come on top"

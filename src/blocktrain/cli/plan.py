"""`blocktrain plan`: what fits, how long it takes and what it costs. Imports no PyTorch, unless `--verify` is given."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from blocktrain.cli.show_plan import as_json, show
from blocktrain.errors import ConfigError, PartitionError, StorageError, nearest
from blocktrain.outputs import write_output
from blocktrain.parse import number_between
from blocktrain.plan.comparison import alternatives, nearest_change
from blocktrain.plan.configure import HEAD, toml, train_config
from blocktrain.plan.cost import BFMultiplier, find_multiplier
from blocktrain.plan.fit import Candidate, Capacity, Request, capacity_of, fit
from blocktrain.plan.hardware import (
    GIB,
    THIS_MACHINE,
    Hardware,
    Origin,
    Price,
    Rates,
    achievable,
    calibrated,
    load_calibration,
    load_hardware,
)
from blocktrain.plan.layout import TRAINING_METHODS, TrainingMethod, find_precision
from blocktrain.plan.outcome import Outcome
from blocktrain.plan.presets import MODEL_PRESETS, find_model
from blocktrain.plan.shapes import cut_up_to
from blocktrain.plan.spec import ModelSpec, config_values, from_config, has_closed_form
from blocktrain.units import Dollars, format_bytes, parse_span, parse_tokens


def plan(options: argparse.Namespace) -> int:
    """`blocktrain plan --model NAME --tokens 10B --seq 2048 --gpu rtx4090 --gpus 8`."""
    hardware = load_hardware(options.hardware)
    request, price = request_of(options, hardware)
    found = fit(request)
    best = found.candidates[0] if found.candidates else None
    outcome = Outcome(
        request=request,
        fit=found,
        price=price,
        alternatives=alternatives(request, hardware, best),
        change=nearest_change(request, hardware) if best is None else None,
        assumed=hardware.assumed,
    )
    if options.out is not None:
        _write_config(options.out, request, best)
    if options.html is not None:
        from blocktrain.report.planpage import plan_page

        write_output(options.html, plan_page(outcome))
    verified = None
    if options.verify and best is not None:
        from blocktrain.train.config import RunConfig
        from blocktrain.train.verify_plan import tracked_peak

        if best.layout.cards > 1:
            raise ConfigError("--verify runs the step of one card; plan with --gpus 1")
        verified = float(max(tracked_peak(RunConfig.from_mapping(train_config(request, best))).values()))
    if options.json:
        print(json.dumps(as_json(outcome, verified), indent=1))
    else:
        show(outcome, Console(), verified)
        for path, what in ((options.out, "configuration"), (options.html, "page")):
            if path is not None:
                print(f"{what}  {path}")
    return 0


def request_of(options: argparse.Namespace, hardware: Hardware) -> tuple[Request, Price | None]:
    """The request that the options describe, and the price of its cards; raises `ConfigError` for bad input."""
    spec = _spec(options.model)
    for name in ("seq", "gpus", "nodes", "rows", "cache_epochs"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    if spec.family == "gpt2" and options.seq > spec.positions:
        raise ConfigError(f"--seq {options.seq} is longer than the {spec.positions} positions of {spec.name}")
    rates, capacity = _machine(options, hardware)
    if options.gpu.lower() == THIS_MACHINE and options.gpus * options.nodes > 1:
        raise ConfigError("this-machine is one device; leave out --gpus and --nodes")
    precision = None if options.precision == "auto" else find_precision(options.precision).name
    if precision is not None and find_precision(precision).weight not in rates.matmul_flops:
        raise ConfigError(f"'{options.gpu}' has no fast matrix products in {precision}; use --precision fp32")
    cards = options.gpus * options.nodes
    if options.price is None:
        price = hardware.price(options.gpu.lower(), options.provider)
    else:
        given = Origin(kind="given", source="--price", date="now")
        usd_per_hour = Dollars.parse(options.price).amount
        if usd_per_hour <= 0:
            raise ConfigError(f"--price must be more than $0 for an hour, not '{options.price}'")
        price = Price(usd_per_hour=usd_per_hour, provider="--price", origin=given)
    return Request(
        spec=spec,
        card=options.gpu.lower(),
        cards=cards,
        tokens=parse_tokens(options.tokens),
        seq=options.seq,
        rows=max(options.rows, cards),
        rates=rates,
        capacity=capacity,
        usd_per_hour=None if price is None else price.usd_per_hour,
        methods=_methods(options.method),
        blocks=_blocks(options.blocks, spec.layers + 2),
        pieces=options.pieces,
        largest=_largest(options, spec),
        precision=precision,
        moments=_chosen(options.moments),
        state=_chosen(options.state),
        frozen=_chosen(options.frozen),
        checkpointing=_chosen(options.checkpointing),
        loss_chunk=_loss_chunk(options.loss_chunk),
        cache=_chosen(options.cache),
        cards_per_node=options.gpus,
        overlap=hardware.assumed.overlap,
        cache_epochs=options.cache_epochs,
        multiplier=_multiplier(options.multiplier),
        budget=Dollars.parse(options.budget) if options.budget else None,
        deadline=parse_span(options.deadline) if options.deadline else None,
    ), price


def _spec(name: str) -> ModelSpec:
    """A preset, or the model of a `config.json`, a folder with one, or a name on the hub. Only the last, and what has
    no closed form, imports PyTorch."""
    path = Path(name).expanduser()
    is_on_hub = "/" in name and not name.endswith(".json") and not path.exists()
    if name.lower() in MODEL_PRESETS or not (path.exists() or is_on_hub):
        return find_model(name)
    if not is_on_hub and has_closed_form(values := config_values(path)):
        return from_config(values, name)
    from blocktrain.cli.live import quiet_libraries
    from blocktrain.train.count_spec import hub_config, spec_of

    quiet_libraries()
    return spec_of(hub_config(name) if is_on_hub else config_values(path), name)


def _machine(options: argparse.Namespace, hardware: Hardware) -> tuple[Rates, Capacity]:
    assumed = hardware.assumed
    host = options.host_memory or assumed.host_memory_gib_per_card
    disk = options.disk or assumed.disk_gib_per_node
    if options.gpu.lower() == THIS_MACHINE:
        here = load_calibration()
        capacity = capacity_of(here.memory_bytes_total / GIB, 0.0, host, disk, fragmentation=assumed.fragmentation)
        return calibrated(here, hardware), capacity
    card = hardware.card(options.gpu)
    capacity = capacity_of(card.memory_gib, assumed.reserve_gib, host, disk, fragmentation=assumed.fragmentation)
    return achievable(card, hardware), capacity


def _methods(text: str) -> tuple[TrainingMethod, ...]:
    if text == "all":
        return TRAINING_METHODS
    known: dict[str, TrainingMethod] = {method: method for method in TRAINING_METHODS}
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"method '{name}' is unknown; {nearest(name, [*known, 'all'])}")
    return tuple(known[name] for name in names)


def _blocks(text: str, most: int) -> int | None:
    if text == "auto":
        return None
    return number_between("--blocks", int, 1, most, "'auto' or ")(text)


def _chosen(text: str) -> Any:
    return None if text == "auto" else text


def _largest(options: argparse.Namespace, spec: ModelSpec) -> int | None:
    if options.largest is None:
        return None
    if options.blocks != "auto":
        raise ConfigError("give --blocks or --largest, not both")
    if options.pieces != "layers":
        raise ConfigError("--pieces says what a number of blocks is made of; --largest cuts inside layers by itself")
    if options.gpus * options.nodes > 1:
        raise ConfigError(
            "blocks that are cut by their size can only be planned on one card: leave out --gpus and --nodes"
        )
    try:
        cut_up_to(spec, options.largest)
    except PartitionError as error:
        raise ConfigError(f"--largest: {error}") from None
    return options.largest


def _loss_chunk(text: str) -> int | None:
    if text == "auto":
        return None
    if text == "off":
        return 0
    return number_between("--loss-chunk", int, 1, 10**9, "'auto', 'off' or ")(text)


def _multiplier(text: str) -> BFMultiplier:
    """The multiplier of that name or number, or the one measured in the folder of a comparison, which has a run folder
    of each method."""
    folder = Path(text)
    if not folder.is_dir():
        return find_multiplier(text)
    from blocktrain.report.multiplier import multipliers
    from blocktrain.report.run import RunRecord

    runs = [RunRecord.load(path.parent) for path in sorted(folder.glob("*/run.json"))]
    measured = multipliers(runs, [run.header.name for run in runs]) if runs else []
    found = [item for item in measured if item.value is not None]
    if not found:
        raise ConfigError(f"no run in '{folder}' reached the loss of a full run there, so no multiplier is known")
    best = min(found, key=lambda item: item.value or 0.0)
    return BFMultiplier(value=float(best.value or 0.0), source=f"measured, {best.bcd} in {folder}")


def _write_config(path: Path, request: Request, best: Candidate | None) -> None:
    if best is None:
        raise ConfigError(f"nothing fits, so there is no configuration to write to '{path}'")
    if path.exists():
        raise StorageError(f"'{path}' exists already; choose another name for --out")
    head = HEAD.format(
        model=request.spec.name,
        blocks=best.layout.blocks,
        card=request.card,
        peak=format_bytes(best.memory.peak),
        step=f"{best.step.seconds:.3g} s",
    )
    write_output(path, toml(train_config(request, best), head))

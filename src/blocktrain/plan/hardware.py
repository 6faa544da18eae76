"""Cards, links and prices, each with its source, from `hardware.toml` or a file of the user's; and the rates that a
machine achieves."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import date
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from blocktrain.errors import ConfigError, first_line, nearest
from blocktrain.parse import parse_json, parse_toml, shown
from blocktrain.records.codec import decode

OriginKind = Literal["measured", "published", "paper", "assumed", "given"]
GIB = 2.0**30
MOST = 1e30  # of any figure
THIS_MACHINE = "this-machine"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a figure comes from."""

    kind: OriginKind
    source: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """The share of a published peak that training reaches, and what a rented machine has besides its cards. Every field
    is explained in `hardware.toml`."""

    matmul_efficiency_fp32: float
    matmul_efficiency_bf16: float
    attention_efficiency: float
    memory_efficiency: float
    link_efficiency: float
    kernel_seconds: float
    overlap: float
    reserve_gib: float
    fragmentation: float
    host_memory_gib_per_card: float
    host_memory_bytes_per_second: float
    disk_gib_per_node: float
    disk_bytes_per_second: float
    cards_per_node: int
    origin: Origin


@dataclass(frozen=True, kw_only=True)
class Link:
    """Bytes per second in one direction."""

    name: str
    bytes_per_second: float
    origin: Origin


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU's published figures."""

    name: str
    title: str
    memory_gib: float
    fp32_flops: float
    bf16_flops: float | None
    memory_bytes_per_second: float
    host_link: Link
    peer_link: Link
    origin: Origin


@dataclass(frozen=True, kw_only=True)
class Price:
    """Dollars an hour for one card."""

    usd_per_hour: Decimal
    provider: str
    origin: Origin


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Everything in the hardware file."""

    assumed: Assumed
    network: Link
    cards: Mapping[str, Card]
    prices: Mapping[str, Mapping[str, Price]]  # provider -> card -> price

    def card(self, name: str) -> Card:
        """The card called `name`; raises `ConfigError` with near names."""
        if name.lower() in self.cards:
            return self.cards[name.lower()]
        near = [card for card in self.cards if name.lower() in card or card in name.lower()]
        hint = (
            f"did you mean {' or '.join(repr(card) for card in near)}?" if near else nearest(name.lower(), self.cards)
        )
        raise ConfigError(f"GPU '{name}' is unknown; {hint}")

    def price(self, card: str, provider: str | None = None) -> Price | None:
        """What `provider` asks for the card, or the first provider that has it; None where nobody does."""
        if provider is not None and provider not in self.prices:
            raise ConfigError(f"provider '{provider}' is unknown; {nearest(provider, self.prices)}")
        for name in [provider] if provider else self.prices:
            if card in self.prices[name]:
                return self.prices[name][card]
        return None


def load_hardware(extra: Path | None = None) -> Hardware:
    """The package's figures, overridden by those in `extra`, a file of the same form; raises `ConfigError`."""
    values = tomllib.loads(resources.files("blocktrain.plan").joinpath("hardware.toml").read_text(encoding="utf-8"))
    if extra is not None:
        if extra.exists() and not extra.is_file():
            raise ConfigError(f"hardware file '{extra}' is not a file: it is a folder, a pipe or a device")
        try:
            given = parse_toml(extra.read_text(encoding="utf-8"), f"hardware file '{extra}'")
        except FileNotFoundError:
            raise ConfigError(f"hardware file '{extra}' does not exist") from None
        except OSError as error:
            raise ConfigError(f"hardware file '{extra}' cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"hardware file '{extra}' is not UTF-8 (byte {error.start:,}); save it as UTF-8"
            ) from None
        try:
            values = _merged(values, given, values)
        except ConfigError as error:
            raise ConfigError(f"hardware file '{extra}': {error}; the package's hardware.toml shows the form") from None
    try:
        return _hardware(values)
    except KeyError as error:
        raise ConfigError(f"'{extra}': key {error} is missing; the package's hardware.toml shows the form") from None


_NAMED = ("links", "cards", "providers", "usd_per_hour")  # tables whose keys are names, and whose values are alike


def _merged(below: Mapping[str, Any], above: Mapping[str, Any], form: Mapping[str, Any], place: str = "") -> Any:
    """`below` with what `above` replaces and adds, whose keys and kinds of values must be those of `form`."""
    result = dict(below)
    for key, value in above.items():
        where = f"{place}.{key}" if place else key
        if place.rpartition(".")[2] in _NAMED:
            like = next(iter(form.values()))
        elif key in form:
            like = form[key]
        else:
            raise ConfigError(f"unknown key '{where}'; {nearest(key, form)}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(like, dict):
            if not isinstance(value, dict):
                raise ConfigError(f"'{where}' must be a table, not {shown(value)}")
            result[key] = _merged(result.get(key, {}), value, like, where)
        elif isinstance(like, str):
            if not isinstance(value, str | date):
                raise ConfigError(f"'{where}' must be text, not {shown(value)}")
            result[key] = value
        elif not is_number or not 0 < value <= MOST:
            raise ConfigError(f"'{where}' must be a positive number of at most {MOST:g}, not {shown(value)}")
        else:
            result[key] = value
    return result


def _hardware(values: Mapping[str, Any]) -> Hardware:
    links = {
        name: Link(name=name, bytes_per_second=float(item["bytes_per_second"]), origin=_origin(item))
        for name, item in values["links"].items()
    }
    names = {item.name for item in fields(Assumed)} - {"origin"}
    assumed = Assumed(**{name: values["assumed"][name] for name in names}, origin=_origin(values["assumed"]))
    cards = {}
    for name, item in values["cards"].items():
        for key in ("host_link", "peer_link"):
            if item[key] not in links:
                raise ConfigError(f"card '{name}': {key} '{item[key]}' is unknown; {nearest(str(item[key]), links)}")
        cards[name] = Card(
            name=name,
            title=item["title"],
            memory_gib=float(item["memory_gib"]),
            fp32_flops=float(item["fp32_flops"]),
            bf16_flops=float(item["bf16_flops"]) if "bf16_flops" in item else None,
            memory_bytes_per_second=float(item["memory_bytes_per_second"]),
            host_link=links[item["host_link"]],
            peer_link=links[item["peer_link"]],
            origin=_origin(item),
        )
    prices = {
        provider: {
            card: Price(usd_per_hour=Decimal(str(usd)), provider=item["title"], origin=_origin(item))
            for card, usd in item["usd_per_hour"].items()
        }
        for provider, item in values["providers"].items()
    }
    return Hardware(assumed=assumed, network=links["network"], cards=cards, prices=prices)


def _origin(item: Mapping[str, Any]) -> Origin:
    return Origin(kind=item["kind"], source=item["source"], date=str(item["date"]))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one card achieves, in FLOPs, bytes or parameters per second, and how each rate is known.

    matmul_flops, attention_flops: by the bytes of the compute dtype (4: fp32, 2: bf16). A dtype that the card does not
        multiply is absent.
    memory_bytes: of elementwise kernels, read and written. kernel_seconds: the shortest time of a kernel.
    update_scalars: parameters that fused AdamW updates. host_memory_bytes: what AdamW on the host reads and writes.
    kind: how all rates are known but those in `other_kinds`, which is by the name of the rate.
    """

    matmul_flops: Mapping[int, float]
    attention_flops: Mapping[int, float]
    memory_bytes: float
    kernel_seconds: float
    update_scalars: float
    host_link_bytes: float
    peer_link_bytes: float
    network_bytes: float
    host_memory_bytes: float
    disk_bytes: float
    kind: OriginKind
    other_kinds: Mapping[str, OriginKind] = field(default_factory=dict)


UPDATE_BYTES = 28  # AdamW of one fp32 scalar: weight, gradient, two moments read; weight and moments written


def achievable(card: Card, hardware: Hardware) -> Rates:
    """A card's published peaks times the assumed efficiencies, with assumed rates of the machine around it."""
    assumed = hardware.assumed
    peaks = {4: (card.fp32_flops, assumed.matmul_efficiency_fp32)}
    if card.bf16_flops is not None:
        peaks[2] = (card.bf16_flops, assumed.matmul_efficiency_bf16)
    stream = card.memory_bytes_per_second * assumed.memory_efficiency
    return Rates(
        matmul_flops={dtype: peak * share for dtype, (peak, share) in peaks.items()},
        attention_flops={dtype: peak * assumed.attention_efficiency for dtype, (peak, _) in peaks.items()},
        memory_bytes=stream,
        kernel_seconds=assumed.kernel_seconds,
        update_scalars=stream / UPDATE_BYTES,
        host_link_bytes=card.host_link.bytes_per_second * assumed.link_efficiency,
        peer_link_bytes=card.peer_link.bytes_per_second * assumed.link_efficiency,
        network_bytes=hardware.network.bytes_per_second * assumed.link_efficiency,
        host_memory_bytes=assumed.host_memory_bytes_per_second,
        disk_bytes=assumed.disk_bytes_per_second,
        kind="published",
        other_kinds={"kernel_seconds": "assumed", "host_memory_bytes": "assumed", "disk_bytes": "assumed"},
    )


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """The rates of `Rates` that one machine with one device can measure. disk_bytes: None where it could not write."""

    matmul_flops: Mapping[int, float]
    attention_flops: Mapping[int, float]
    memory_bytes: float
    kernel_seconds: float
    update_scalars: float
    host_link_bytes: float
    host_memory_bytes: float
    disk_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What `blocktrain calibrate` measured on this machine, as it is stored: nothing else."""

    device: str
    memory_bytes_total: float
    rates: MeasuredRates
    date: str


def calibrated(calibration: Calibration, hardware: Hardware) -> Rates:
    """The measured rates, completed by published and assumed ones, which `other_kinds` names.

    Links cannot be measured with one device. Whatever is connected to it is taken to be reached over the network.
    """
    measured = calibration.rates
    network = hardware.network.bytes_per_second * hardware.assumed.link_efficiency
    other_kinds: dict[str, OriginKind] = {
        "peer_link_bytes": hardware.network.origin.kind,
        "network_bytes": hardware.network.origin.kind,
    }
    if measured.disk_bytes is None:
        other_kinds["disk_bytes"] = "assumed"
    disk = hardware.assumed.disk_bytes_per_second if measured.disk_bytes is None else measured.disk_bytes
    rates = {**vars(measured), "disk_bytes": disk, "peer_link_bytes": network, "network_bytes": network}
    return Rates(**rates, kind="measured", other_kinds=other_kinds)


def calibration_file() -> Path:
    """Where `blocktrain calibrate` stores its rates: in the user's configuration folder."""
    home = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(home) / "blocktrain" / "this-machine.json"


def load_calibration(path: Path | None = None) -> Calibration:
    """The stored measurements; raises `ConfigError` where there are none."""
    path = path or calibration_file()
    try:
        values = parse_json(path.read_bytes(), "it", ConfigError)
        found = decode(Calibration, values if isinstance(values, dict) else {})
        for name, rate in {**vars(found.rates), "memory_bytes_total": found.memory_bytes_total}.items():
            numbers = rate.values() if isinstance(rate, Mapping) else [] if rate is None else [rate]
            if not all(MOST >= number > 0 for number in numbers):
                raise ConfigError(f"'{name}' must be positive and at most {MOST:g}, not {shown(rate)}")
        return found
    except FileNotFoundError:
        raise ConfigError(
            f"this machine has not been measured yet: run 'blocktrain calibrate' ('{path}' is missing)"
        ) from None
    except (OSError, ConfigError, ValueError) as error:
        raise ConfigError(f"'{path}' cannot be read ({first_line(error)}); run 'blocktrain calibrate' again") from None

"""Every figure says where it comes from; files and flags override; names are forgiving."""

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from blocktrain.errors import ConfigError
from blocktrain.plan.hardware import achievable, load_calibration, load_hardware

CARDS = ("rtx3090", "rtx4090", "rtx5090", "a100-40", "a100-80", "a800", "h100", "h200", "l40s", "v100")


def test_every_card_and_price_has_a_source_and_a_date() -> None:
    hardware = load_hardware()
    assert set(CARDS) == set(hardware.cards)
    assert len(hardware.prices) == 6
    origins = [card.origin for card in hardware.cards.values()]
    origins += [link.origin for card in hardware.cards.values() for link in (card.host_link, card.peer_link)]
    origins += [price.origin for prices in hardware.prices.values() for price in prices.values()]
    for origin in origins:
        assert origin.kind in ("published", "paper")
        assert origin.source
        assert origin.date
        assert ("not re-checked" in origin.source) == (origin.kind == "published")


def test_the_papers_prices() -> None:
    """Sections 4.4.1 and A.4."""
    hardware = load_hardware()
    price = hardware.price("rtx4090")
    assert price is not None
    assert price.usd_per_hour == Decimal("0.29")
    other = hardware.price("rtx4090", "galaxy")
    assert other is not None
    assert other.usd_per_hour == Decimal("0.19")
    assert hardware.price("h100") is None
    with pytest.raises(ConfigError, match="did you mean 'galaxy'"):
        hardware.price("rtx4090", "galaxi")


def test_a_file_adds_cards_and_replaces_prices(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[providers.wuwen.usd_per_hour]\nrtx4090 = 0.40\n[cards.rtx4090]\nmemory_gib = 48\n")
    hardware = load_hardware(path)
    price = hardware.price("rtx4090")
    assert price is not None
    assert price.usd_per_hour == Decimal("0.4")
    assert hardware.card("rtx4090").memory_gib == 48
    assert hardware.card("a100-80").memory_gib == 80


@pytest.mark.parametrize(
    ("name", "near"), [("rtx4009", "'rtx4090'"), ("a100", "'a100-40' or 'a100-80'"), ("4090", "rtx4090")]
)
def test_an_unknown_card_names_near_ones(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=near):
        load_hardware().card(name)


def test_a_card_without_bf16_has_no_such_rate() -> None:
    hardware = load_hardware()
    assert set(achievable(hardware.card("v100"), hardware).matmul_flops) == {4}


def test_without_a_calibration_the_message_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run 'blocktrain calibrate'"):
        load_calibration(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foo = 1", "unknown key 'foo'"),
        ("[cards.rtx4090]\nmemory_gb = 48", "unknown key 'cards.rtx4090.memory_gb'; did you mean 'memory_gib'"),
        ("[cards]\nrtx4090 = 3", "'cards.rtx4090' must be a table, not 3"),
        ("[cards.rtx4090]\nmemory_gib = 'x'", "'cards.rtx4090.memory_gib' must be a positive number of at most"),
        ("[cards.rtx4090]\nmemory_gib = nan", "'cards.rtx4090.memory_gib' must be a positive number"),
        ("[assumed]\nlink_efficiency = -1", "'assumed.link_efficiency' must be a positive number"),
        ("[links.mine]\nbytes_per_second = 1", "key 'kind' is missing"),
        ("x = " + "[" * 3000, "nested too deeply"),
        ("x = " + "9" * 6000, "a number of thousands of digits"),
    ],
)
def test_a_hardware_file_is_checked_against_the_form_of_the_packages_own(
    text: str, message: str, tmp_path: Path
) -> None:
    """`--hardware` ignored keys that it did not know, and a value of another kind ended in a traceback."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_hardware(path)


@pytest.mark.parametrize(
    "text",
    ["[" * 3000, "[]", '{"rates": 3}', "9" * 6000],
)
def test_a_damaged_calibration_is_one_message(text: str, tmp_path: Path) -> None:
    path = tmp_path / "this-machine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="run 'blocktrain calibrate' again") as caught:
        load_calibration(path)
    assert str(caught.value).count(str(path)) == 1  # it was named twice, and quoted within quotes


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan"), "fast"])
def test_a_calibration_of_impossible_rates_is_refused(wrong: object, tmp_path: Path) -> None:
    names = ("memory_bytes", "kernel_seconds", "update_scalars", "host_link_bytes", "host_memory_bytes", "disk_bytes")
    rates = {"matmul_flops": {"4": 1e11}, "attention_flops": {"4": 1e10}, **dict.fromkeys(names, 1e9)}
    values = {"device": "cpu", "memory_bytes_total": 16e9, "rates": rates, "date": "2026-11-01"}
    path = tmp_path / "this-machine.json"
    path.write_text(json.dumps(values))
    assert load_calibration(path).rates.matmul_flops == {4: 1e11}
    path.write_text(json.dumps({**values, "rates": {**rates, "memory_bytes": wrong}}))
    with pytest.raises(ConfigError, match="run 'blocktrain calibrate' again"):
        load_calibration(path)

"""Every figure says where it comes from; files and flags override; names are forgiving."""

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

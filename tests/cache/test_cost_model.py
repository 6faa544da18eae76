"""The arithmetic of the decision, compared with sums done by hand, and the reasons it gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from blocktrain.cache.config import PrefixConfig
from blocktrain.cache.cost_model import (
    CacheFacts,
    VisitReuse,
    choose,
)
from blocktrain.errors import ConfigError
from blocktrain.probe import Medium

MIB = 2**20

# 1000 rows of 1 MiB, a prefix of 1 GFLOP a row at 100 GFLOP/s: 10 ms a row, 10 s a pass. Reading a pass takes 1 s from
# the device, 2 s from the host, 5 s from a file; writing it as long.
RATES: dict[Medium, float] = {"device": 1000 * MIB, "host": 500 * MIB, "file": 200 * MIB}
ONCE = VisitReuse(uses=1, prefix_flops=10**9, fill_flops=10**9)
TWICE = VisitReuse(uses=2, prefix_flops=10**9, fill_flops=10**9)
TEN_TIMES = VisitReuse(uses=10, prefix_flops=10**9, fill_flops=10**9)
ADVANCED = VisitReuse(uses=1, prefix_flops=2 * 10**9, fill_flops=10**9)
FOUND = VisitReuse(uses=1, prefix_flops=10**9, fill_flops=0)


def facts(*visits: VisitReuse, **changes: Any) -> CacheFacts:
    usual: dict[str, Any] = {
        "num_slots": 1000,
        "row_bytes": MIB,
        "flops_per_second": 1e11,
        "read_bytes_per_second": RATES,
        "write_bytes_per_second": RATES,
        "free_bytes": {"host": 1e12, "file": 1e12},
    }
    return CacheFacts(visits=visits, **{**usual, **changes})


CASES: dict[str, tuple[CacheFacts, Medium | None, float, float, str]] = {
    # filling 10 s, writing 2, reading 2 x 2: 16 instead of 20
    "used twice": (facts(TWICE), "host", 20, 16, "host: 16 s of filling and reading instead of 20 s of prefix passes"),
    "used ten times": (facts(TEN_TIMES), "host", 100, 32, "host: 32 s"),
    "used once": (facts(ONCE), None, 10, 0, "cannot pay: each row is used once in the visit and no later visit sees"),
    "not all rows": (
        facts(VisitReuse(uses=0.25, prefix_flops=10**9, fill_flops=10**9)),
        None,
        2.5,
        0,
        "cannot pay: each row is used 0.25 times in the visit",
    ),
    # filling 10 + 10, writing 2 x 2, reading 2 x 2: 28 instead of 10 + 20
    "used once, then advanced": (facts(ONCE, ADVANCED), "host", 30, 28, "host: 28 s"),
    # stored at the visit's boundary: reading only
    "stored by the visit before": (facts(FOUND), "host", 10, 2, "host: 2 s"),
    # descending, three boundaries: filling 10, writing 3 x 2, reading 2 + 2 + 2 instead of 10 + 10 + 10
    "descending": (facts(ONCE, FOUND, FOUND, boundaries=3), "host", 30, 22, "host: 22 s"),
    "on a device": (facts(TWICE, free_bytes={"file": 1e12, "host": 1e12, "device": 1e12}), "device", 20, 13, "device:"),
    "device too small": (
        facts(TWICE, free_bytes={"device": 1999 * MIB, "host": 2000 * MIB, "file": 1e12}),
        "host",
        20,
        16,
        "host: 16 s",
    ),
    # 10 + 5 + 50 = 65 instead of 100
    "host too small": (facts(TEN_TIMES, free_bytes={"host": 1999 * MIB, "file": 1e12}), "file", 100, 65, "file: 65 s"),
    "too small for three boundaries": (
        facts(TEN_TIMES, boundaries=3, free_bytes={"host": 5999 * MIB, "file": 3000 * MIB}),
        None,
        100,
        0,
        "does not pay: host has room for 2.9 GiB of 2.9 GiB; file has room for 2.6 GiB of 2.9 GiB",
    ),
    "no room anywhere": (
        facts(TEN_TIMES, free_bytes={"host": 100 * MIB, "file": 1000 * MIB}),
        None,
        100,
        0,
        "does not pay: host has room for 50.0 MiB of 1000.0 MiB; file has room for 900.0 MiB of 1000.0 MiB",
    ),
    # 10 + 5 + 2 x 5 = 25 instead of 20
    "slow disk": (
        facts(TWICE, free_bytes={"host": 0, "file": 1e12}),
        None,
        20,
        0,
        "does not pay: host has room for 0 B of 1000.0 MiB; file would take 25 s instead of 20 s",
    ),
    "disk that could not be written to": (
        facts(TWICE, free_bytes={"host": 0, "file": 1e12}, read_bytes_per_second={"host": 1.0}),
        None,
        20,
        0,
        "file could not be written to",
    ),
    "free prefix": (
        facts(VisitReuse(uses=9, prefix_flops=0, fill_flops=0)),
        None,
        0,
        0,
        "cannot pay: the prefix costs no FLOPs",
    ),
    # The rate of a pass without FLOPs is meaningless: it once made the visits after this one seem to take months.
    "free prefix, later visits are not": (
        facts(VisitReuse(uses=9, prefix_flops=0, fill_flops=0), TEN_TIMES, flops_per_second=1.0),
        None,
        1e13,
        0,
        "cannot pay: the prefix costs no FLOPs",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_by_hand(case: str):
    given, place, without, with_cache, reason = CASES[case]
    choice = choose(given)
    assert choice.place == place
    assert reason in choice.reason
    if place is not None:
        assert f"{with_cache:g} s of filling and reading instead of {without:g} s" in choice.reason


@pytest.mark.parametrize("wanted", ["device", "host", "file"])
def test_a_store_that_the_configuration_names_is_taken_whatever_it_costs(wanted: Literal["device", "host", "file"]):
    choice = choose(facts(ONCE, free_bytes={}), wanted)
    assert (choice.place, choice.reason) == (wanted, f"store = '{wanted}' in the configuration")


def test_off_is_no_store():
    assert choose(facts(TEN_TIMES), "off").place is None


def test_the_choice_turns_where_the_sums_are_equal():
    """host: 10 + 2 + 2 u seconds instead of 10 u, so from u = 1.5 on."""
    for uses, place in ((1.49, None), (1.51, "host")):
        assert choose(facts(replace(TWICE, uses=uses))).place == place


def test_configuration():
    with pytest.raises(ConfigError, match="fill_rows must be at least 1, not 0"):
        PrefixConfig(fill_rows=0)

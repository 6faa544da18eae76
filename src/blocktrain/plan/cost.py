"""From step time to hours and dollars, and what the B-F multiplier does to them (paper sections 4.2.3 and 4.4).

cost        step seconds x steps x multiplier x cards x price
reduction   1 - cost of BCD / cost of full training
break-even  the multiplier at which both cost the same
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from blocktrain.errors import ConfigError
from blocktrain.units import Dollars

# Tokens that BCD needs over tokens that full training needs, to the same loss: the paper's average and its worst case
# (Adam, section 4.2.3), and the value with which its tables 5 to 7 and 12 to 14 were made (see experiments/economics).
MULTIPLIERS: Mapping[str, float] = {"average": 1.39, "worst": 2.77, "tables": 1.25}


@dataclass(frozen=True, kw_only=True)
class BFMultiplier:
    """A B-F multiplier, and where it comes from."""

    value: float
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.value < 1000:
            raise ConfigError(f"a multiplier must be positive, not {self.value:g}")


SAME_TOKENS = BFMultiplier(value=1.0, source="the same number of tokens")


def find_multiplier(text: str) -> BFMultiplier:
    """`"average"`, `"worst"` or `"tables"` (the paper's), or a number; raises `ConfigError` for anything else."""
    if text in MULTIPLIERS:
        where = "as in the paper's tables" if text == "tables" else "paper, section 4.2.3"
        return BFMultiplier(value=MULTIPLIERS[text], source=f"{text}, {where}")
    try:
        return BFMultiplier(value=float(text), source="given")
    except ValueError:
        known = ", ".join(MULTIPLIERS)
        raise ConfigError(
            f"multiplier '{text}' is neither a number nor one of {known}, nor the folder of a comparison"
        ) from None


def price_of(seconds: float, cards: int, usd_per_hour: Decimal) -> Dollars:
    """What `cards` cards cost for `seconds`."""
    return Dollars(Decimal(str(seconds)) / 3600 * cards * usd_per_hour)


def reduction(cost: float, full_cost: float) -> float:
    """`reduction(25, 100) == 0.75`: the share of the full cost that is saved."""
    return 1 - cost / full_cost


def break_even(cost_at_one: float, full_cost: float) -> float:
    """The multiplier up to which training in blocks is cheaper; `cost_at_one` is its cost at a multiplier of 1."""
    return full_cost / cost_at_one
